"""Formats layer by layer, and their file."""
import json

import pytest

from moejax import kv_schedule
from pallas_kernels.kv_format import KVFormat

A, B = KVFormat(k_bits=3, v_bits=2, sink_tokens=4), KVFormat(k_bits=8, v_bits=8)


def test_file_round_trip(tmp_path):
    formats = (B, A, A, A, KVFormat())
    path = tmp_path / "schedule.json"
    path.write_text(kv_schedule.dump(formats, about="why"))
    data = json.loads(path.read_text())
    assert data["base"] == {"k_bits": 3, "v_bits": 2, "sink_tokens": 4} and data["layers"]["0"] == {
        "k_bits": 8, "v_bits": 8, "sink_tokens": 0}
    assert kv_schedule.load(path, 5) == formats


def test_means_and_names():
    formats = kv_schedule.skip_layers(A, 4, first=1)
    assert formats == (KVFormat(), A, A, A)
    assert kv_schedule.effective_bits(formats, 64) == (16 + 3 * A.page_layout(64).effective_bits()) / 4
    assert kv_schedule.effective_bits_at(formats, 64, 4096) > kv_schedule.effective_bits(formats, 64)
    assert kv_schedule.name(formats) == "mixed(k16v16 x1, k3v2+sink4 x3)" and kv_schedule.name((A, A)) == A.name


@pytest.mark.parametrize(("text", "message"), [
    ("nonsense", "not a JSON file"), ('{"bas": {}}', "keys base, layers"), ('{"base": {"k_bit": 3}}', "k_bit"),
    ('{"base": {"k_bits": 5}}', "base: KVFormat.k_bits=5"), ('{"layers": {"7": {}}}', "layer '7'"),
    ('{"layers": {"x": {}}}', "layer 'x'"), ('{"layers": {"1": {"page_size": 64}}}', "one page size"),
    ('{"layers": [{}]}', "layers=.*object of layer numbers")])
def test_bad_files_are_named(tmp_path, text, message):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        kv_schedule.load(tmp_path / "s.json", 4)


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (3, 2)])
def test_too_many_layers_to_skip(first, last):
    with pytest.raises(ValueError, match=f"skip_first_layers={first}, skip_last_layers={last}"):
        kv_schedule.skip_layers(A, 4, first=first, last=last)
    with pytest.raises(ValueError, match="2 KV formats"):
        kv_schedule.per_layer((A, A), 4)
