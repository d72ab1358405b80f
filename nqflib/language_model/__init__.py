"""The language model of paper 2: a small decoder, its text, and its pretraining, at four scales.

`transformer` is the model, `presets` its sizes, `corpus` the tokens, `pretrain` the run that leaves the checkpoints
from which surrogates, spectra and stability start. Source: Meterez et al. 2026, whose set-up this follows.
"""
