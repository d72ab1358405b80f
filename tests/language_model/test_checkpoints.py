"""Checkpoints come back bit by bit, and a damaged one is named and left alone."""

import dataclasses

import pytest
import torch

from nqflib.language_model.checkpoints import Averaged, Checkpoint, load_checkpoint, save_checkpoint
from nqflib.language_model.storage import DamagedFileError


def example() -> Checkpoint:
    generator = torch.Generator().manual_seed(0)

    def tensors():
        return {name: torch.randn(shape, generator=generator) for name, shape in (("b", (3, 2)), ("a", (4,)))}

    return Checkpoint(
        step=7,
        steps=10,
        rate=1 / 3,
        beta2_product=0.95**7,
        recipe={"size": {"vocabulary": 11}},
        history={"step": [1, 7], "loss": [0.1 + 0.2, 1e-17]},
        train_loss=torch.rand(7, generator=generator),
        weights=tensors(),
        first_moment=tensors(),
        second_moment=tensors(),
        averages=(Averaged(0.04, tensors(), tensors()), Averaged(0.08, tensors(), tensors())),
    )


def flat(value):
    """Everything in a checkpoint as comparable leaves."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    if dataclasses.is_dataclass(value):
        return [flat(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [(key, flat(item)) for key, item in value.items()]
    return [flat(item) for item in value] if isinstance(value, tuple | list) else value


def test_a_checkpoint_comes_back_bit_by_bit_and_makes_the_same_file_again(tmp_path):
    save_checkpoint(tmp_path / "a", example())
    loaded = load_checkpoint(tmp_path / "a", vocabulary=11)
    assert flat(loaded) == flat(example())
    assert loaded.done == 0.7
    assert torch.equal(loaded.average(0.08).weights["a"], example().averages[1].weights["a"])
    save_checkpoint(tmp_path / "b", loaded)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(ValueError, match=r"window must be one of \[0.04, 0.08\], got 0.5"):
        loaded.average(0.5)


def test_every_damage_is_noticed_named_and_left_as_it_is(tmp_path):
    file = tmp_path / "step_00000007.safetensors"
    save_checkpoint(file, example())
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    damages = [whole[:-1], whole[: header // 2], whole[:3], b"", whole + b"\0"]
    for place in (0, 12, 8 + header // 2, 8 + whole[8:].index(b"beta2_product") + 16, 8 + header + 1, len(whole) - 1):
        damages.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    for damaged in damages:
        file.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"step_00000007\.safetensors is damaged; delete it to resume"):
            load_checkpoint(file)
        assert file.read_bytes() == damaged
    file.write_bytes(whole)
    load_checkpoint(file)


def test_another_vocabulary_and_a_missing_file_are_refused(tmp_path):
    save_checkpoint(tmp_path / "a", example())
    with pytest.raises(ValueError, match="trained on a vocabulary of 11 tokens, but the text has 12"):
        load_checkpoint(tmp_path / "a", vocabulary=12)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "b")
