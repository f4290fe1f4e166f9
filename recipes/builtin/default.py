"""Attention transfer, then LoRA with cross-entropy and KL: what `convert` does when nothing else is asked for.

Source: the transfer stage of LoLCATs and RADLADS with LoRA beside the new tensors, the closed-form starts of this
package, then KL from the zero-copy teacher. The rates suit the mixer: gentler beside a softmax window.

Numbers: the bundled teacher to rodimus, held-out perplexity over the teacher's: 1.066 and 1.067 (seeds 0 and 1).

Cost: 300k tokens; three minutes on two CPU cores for the bundled teacher, control included.
"""

from linearize.recipes import Recipe

recipe = Recipe()
