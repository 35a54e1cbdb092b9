"""An output head in the files of a model whose config.json ties it to the embeddings."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ttrl.errors import ModelFolderError
from ttrl.system.weight_files import check_tied_head, stored_tensors

EMBEDDINGS = torch.arange(24, dtype=torch.float32).reshape(6, 4)
OTHER = torch.zeros(3, 3)


def saved(folder, name="model.safetensors", **tensors):
    path = folder / name
    named = {key.replace("__", "."): tensor for key, tensor in tensors.items()}
    save_file(named, path, metadata={"format": "pt"})
    return path


def test_an_equal_head_is_fine_in_one_file_or_several(tmp_path):
    one = saved(
        tmp_path,
        model__embed_tokens__weight=EMBEDDINGS,
        a=OTHER,
        lm_head__weight=EMBEDDINGS.clone(),
    )
    check_tied_head([one], chunk_bytes=16)  # read in several pieces
    first = saved(tmp_path, "first.safetensors", model__embed_tokens__weight=EMBEDDINGS)
    second = saved(tmp_path, "second.safetensors", lm_head__weight=EMBEDDINGS, a=OTHER)
    check_tied_head([first, second], chunk_bytes=16)
    check_tied_head([first])  # no head at all
    check_tied_head([])


@pytest.mark.parametrize("row", [0, 5])
def test_a_head_that_differs_is_named_with_the_embeddings(row, tmp_path):
    head = EMBEDDINGS.clone()
    head[row, 3] += 1
    first = saved(tmp_path, "first.safetensors", transformer__wte__weight=EMBEDDINGS)
    second = saved(tmp_path, "second.safetensors", a=OTHER, lm_head__weight=head)
    with pytest.raises(ModelFolderError) as error:
        check_tied_head([first, second], chunk_bytes=16)
    said = str(error.value)
    assert said.startswith(f"{tmp_path}: config.json ties the output head")
    assert (
        "lm_head.weight in second.safetensors differs from transformer.wte.weight in first.s"
        in said
    )
    assert "their values differ" in said and '"tie_word_embeddings": false' in said


def test_shapes_and_dtypes(tmp_path):
    def check(embeddings, head):
        file = saved(tmp_path, model__embed_tokens__weight=embeddings, lm_head__weight=head)
        check_tied_head([file])

    values = torch.tensor([[1.0, -2.5], [1e-3, 3e38]], dtype=torch.bfloat16)
    check(values, values.float())  # a trainer kept the head in fp32, but did not train it
    check(values.float(), values)
    changed = values.float()
    changed[0, 0] += 1e-5
    with pytest.raises(ModelFolderError, match="their values differ"):
        check(values, changed)
    with pytest.raises(ModelFolderError, match=r"its shape is \[7, 4\], not \[6, 4\]"):
        check(EMBEDDINGS, torch.zeros(7, 4))
    with pytest.raises(ModelFolderError, match="it is F16, not F32"):
        check(EMBEDDINGS, EMBEDDINGS.half())


def test_headers_and_damaged_files(tmp_path):
    copy = EMBEDDINGS.clone()
    file = saved(tmp_path, model__embed_tokens__weight=EMBEDDINGS, lm_head__weight=copy)
    found = {tensor.name: tensor for tensor in stored_tensors(file)}
    assert found.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    head = found["lm_head.weight"]
    assert (head.dtype, head.shape, head.stop - head.start) == ("F32", (6, 4), 96)
    assert file.read_bytes()[head.start : head.stop] == EMBEDDINGS.numpy().tobytes()
    whole = file.read_bytes()
    for damaged in (b"", b"x", b"\xff" * 20, whole[:-1], json.dumps({"a": 1}).encode()):
        file.write_bytes(damaged)
        with pytest.raises(ModelFolderError, match=r"model\.safetensors cannot be read"):
            check_tied_head([file])
