"""Dense decoders as mixtures of experts: which class of transformers holds a model, and which tensor goes where.

A class holds a base where it computes the same with the base's own tensors. No table says so; it is tested: both are
built, the names and shapes of all tensors must fit, and a tiny twin of the base must give the same logits in the other
class. `targets` lists each class's names of experts on disk, and the settings that keep its function equal.
"""
