"""Tokenizers from a folder: special ids, padding ids, text round trip."""
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from moejax.tokenizer import Tokenizer

TEXT = "the quick brown fox jumps over the lazy dog 0123456789, naïve café\n" * 4


def backend() -> tokenizers.Tokenizer:
    """A small byte-level BPE with <s> = 0, </s> = 1."""
    tk = tokenizers.Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = decoders.ByteLevel()
    tk.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tk


@pytest.fixture
def folder(tmp_path):
    backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name, **content):
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("name, content, words", [
    ("generation_config.json", {"eos_token_id": "x"}, "generation_config.json: eos_token_id='x'"),
    ("config.json", {"eos_token_id": [0, 2.5]}, "config.json: eos_token_id=2.5"),
    ("config.json", {"eos_token_id": 2**31}, "config.json: eos_token_id=2147483648"),
    ("generation_config.json", {"bos_token_id": "<s>"}, "generation_config.json: bos_token_id='<s>'"),
    ("generation_config.json", {"bos_token_id": [0, 1]}, r"bos_token_id=\[0, 1\]: must be one id"),
    ("tokenizer_config.json", {"bos_token": {"text": "<s>"}}, "tokenizer_config.json: bos_token="),
    ("tokenizer_config.json", {"bos_token": 5}, "tokenizer_config.json: bos_token=5"),
    ("tokenizer_config.json", {"add_bos_token": "yes"}, "tokenizer_config.json: add_bos_token='yes'"),
])
def test_settings_of_a_wrong_type_are_refused_with_their_file(folder, name, content, words):
    write(folder, name, **content)
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_folder(folder)


def test_round_trip_of_any_text(folder):
    tk = Tokenizer.from_folder(folder)
    for text in (TEXT, "", "日本語 \U0001f600\t\x00", " leading and trailing  "):
        assert tk.decode(tk.encode(text)) == text


def test_eos_of_generation_config_wins(folder):
    write(folder, "config.json", eos_token_id=1, bos_token_id=0)
    assert Tokenizer.from_folder(folder).eos_ids == (1,)
    write(folder, "generation_config.json", eos_token_id=[1, 7])
    tk = Tokenizer.from_folder(folder)
    assert tk.eos_ids == (1, 7) and tk.bos_id == 0 and not tk.add_bos


def test_no_special_ids(folder):
    tk = Tokenizer.from_folder(folder)
    assert tk.eos_ids == () and tk.bos_id is None
    with pytest.raises(ValueError, match="add_bos"):
        tk.encode("a", add_bos=True)


@pytest.mark.parametrize("how", ["tokenizer_config", "post_processor"])
def test_bos(folder, how):
    write(folder, "config.json", bos_token_id=0)
    if how == "tokenizer_config":
        write(folder, "tokenizer_config.json", add_bos_token=True, bos_token="<s>")
    else:
        tk = backend()
        tk.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tk.save(str(folder / "tokenizer.json"))
    tk = Tokenizer.from_folder(folder)
    assert tk.add_bos
    assert tk.encode("the fox") == [0, *tk.encode("the fox", add_bos=False)]
    assert tk.decode(tk.encode("the fox")) == "the fox"
    assert tk.decode(tk.encode("the fox"), skip_special_tokens=False) == "<s>the fox"


def test_bos_id_by_its_text(folder):
    write(folder, "tokenizer_config.json", bos_token={"content": "<s>"})
    assert Tokenizer.from_folder(folder).bos_id == 0


def test_special_tokens_in_text_are_recognised(folder):
    tk = Tokenizer.from_folder(folder)
    assert tk.encode("the</s>")[-1] == 1


def test_padding_ids_are_not_decodable(folder):
    tk = Tokenizer.from_folder(folder)
    assert tk.vocab_size == tk.num_decodable == tk.backend.get_vocab_size()
    mask = tk.decodable_mask(tk.vocab_size + 5)
    np.testing.assert_array_equal(mask, np.arange(tk.vocab_size + 5) < tk.vocab_size)
    assert all(isinstance(tk.decode([int(i)]), str) for i in np.flatnonzero(mask))
    with pytest.raises(ValueError, match=str(tk.vocab_size)):
        tk.decode([3, tk.vocab_size])
    with pytest.raises(ValueError, match="-1"):
        tk.decode([-1])


def test_gaps_inside_the_vocabulary():
    tk = Tokenizer(backend(), undecodable=[5])
    assert not tk.decodable_mask(300)[5] and tk.decodable_mask(300)[6]
    with pytest.raises(ValueError, match="token id 5"):
        tk.decode([5])


def test_save_and_read_again(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("saved")
    tk = Tokenizer.from_folder(folder)
    tk.save(out)
    assert Tokenizer.from_folder(out).encode(TEXT) == tk.encode(TEXT)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="add_bos"):
        Tokenizer(backend(), add_bos=True)
