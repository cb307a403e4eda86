"""Token files and batches."""
import numpy as np
import pytest

from moejax import data


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "t.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    return data.read_tokens(path, 1000)


def test_a_batch_depends_on_seed_and_step_alone(tokens):
    def batch(seed, step):
        return data.training_batch(tokens, seed=seed, step=step, batch_size=4, seq_len=16)

    np.testing.assert_array_equal(batch(1, 7), batch(1, 7))
    assert not np.array_equal(batch(1, 7), batch(1, 8))
    assert not np.array_equal(batch(1, 7), batch(2, 7))
    assert batch(1, 7).shape == (4, 17)
    assert (np.diff(batch(1, 7).astype(int), axis=1) == 1).all()  # windows are consecutive tokens


def test_the_last_window_can_be_drawn(tokens):
    drawn = data.training_batch(tokens, seed=0, step=0, batch_size=20000, seq_len=16)
    assert drawn.min() == 0 and drawn.max() == 999


def test_evaluation_windows_predict_each_token_once(tokens):
    windows = data.evaluation_windows(tokens, 100)
    np.testing.assert_array_equal(windows[:, 1:].reshape(-1), np.arange(1, 901))
    np.testing.assert_array_equal(windows[:, 0], np.arange(0, 900, 100))


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "t.bin"
    with pytest.raises(FileNotFoundError, match="make data"):
        data.read_tokens(path, 10)
    path.write_bytes(b"\x01\x00\x02")
    with pytest.raises(ValueError, match="3 bytes"):
        data.read_tokens(path, 10)
    np.array([1, 10], "<u2").tofile(path)
    with pytest.raises(ValueError, match="token id 10, the model's vocab_size is 10"):
        data.read_tokens(path, 10)
    with pytest.raises(ValueError, match="seq_len=2"):
        data.evaluation_windows(np.arange(2), 2)
