"""`experiments.results`: torn lines, locks, files that appear whole."""
import json
import pathlib

import pytest

from experiments import results


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("torn", ['{"b": 2', '{"b": "x\\', "{"])
def test_a_torn_last_line_is_dropped(tmp_path, caplog, torn):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}\n' + torn)
    results.append_jsonl(path, {"c": 3})
    assert lines(path) == [{"a": 1}, {"c": 3}] and "torn" in caplog.text


def test_a_torn_only_line_is_dropped(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a"')
    results.append_jsonl(path, {"c": 3})
    assert lines(path) == [{"c": 3}]


def test_a_last_line_that_lacks_its_end_alone_stays(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}')
    results.append_jsonl(path, {"c": 3})
    assert lines(path) == [{"a": 1}, {"c": 3}]


def test_a_lock_refuses_a_second_and_ends_with_the_first(tmp_path):
    first = results.locked(tmp_path / "run" / "lock", "taken")
    with pytest.raises(ValueError, match="taken"):
        results.locked(tmp_path / "run" / "lock", "taken")
    first.close()
    results.locked(tmp_path / "run" / "lock", "taken").close()


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    results.write_atomic(tmp_path / "a", "before")
    with pytest.raises(UnicodeEncodeError):
        results.write_atomic(tmp_path / "a", "half\udcff")
    assert (tmp_path / "a").read_text() == "before" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_writable_is_asked_of_the_nearest_folder_and_nothing_is_left(tmp_path):
    results.require_writable_file("out=x", tmp_path / "new" / "deeper" / "file")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out=x: .*file exists and is not a folder"):
        results.require_writable_folder("out=x", tmp_path / "file" / "deeper")
    with pytest.raises(ValueError, match="out=x: .* exists and is not a file"):
        results.require_writable_file("out=x", tmp_path)
    with pytest.raises(ValueError, match="out=x: /proc is not writable"):
        results.require_writable_folder("out=x", pathlib.Path("/proc/new"))
