from __future__ import annotations

from pathlib import Path

import pytest

from eyas.errors import ConfigError
from eyas.files import digest_file
from eyas.target.config import TargetConfig
from eyas.target.spec import load_target
from eyas.target.tokenizer import load_tokenizer
from tests.target.tiny_target import write_target

_CODE = """
from transformers import PreTrainedTokenizerFast
from .part import MARK

class OwnTokenizer(PreTrainedTokenizerFast):
    mark = MARK
"""


def _folder_with_code(tmp_path: Path) -> Path:
    auto_map = {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]}
    folder = write_target(tmp_path / "target", tokenizer_config={"auto_map": auto_map, "tokenizer_class": "OwnTokenizer"})
    (folder / "own_tokenizer.py").write_text(_CODE)
    (folder / "part.py").write_text("MARK = 7\n")
    return folder


def _load(folder: Path, **settings: object):
    return load_tokenizer(load_target(TargetConfig(model=str(folder), **settings)))


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        _load(write_target(tmp_path / "t", None))


def test_remote_code_is_refused_with_the_hashes_to_permit(tmp_path: Path) -> None:
    folder = _folder_with_code(tmp_path)
    with pytest.raises(ConfigError, match="not permitted") as refusal:
        _load(folder)
    assert digest_file(folder / "own_tokenizer.py") in str(refusal.value)
    assert digest_file(folder / "part.py") in str(refusal.value)


def test_remote_code_runs_only_where_every_file_is_permitted(tmp_path: Path) -> None:
    folder = _folder_with_code(tmp_path)
    hashes = {name: digest_file(folder / name) for name in ("own_tokenizer.py", "part.py")}
    with pytest.raises(ConfigError, match=r"part\.py"):
        _load(folder, remote_code_sha256={"own_tokenizer.py": hashes["own_tokenizer.py"]})
    assert _load(folder, remote_code_sha256=hashes).mark == 7


def test_changed_code_is_refused(tmp_path: Path) -> None:
    folder = _folder_with_code(tmp_path)
    hashes = {name: digest_file(folder / name) for name in ("own_tokenizer.py", "part.py")}
    (folder / "part.py").write_text("MARK = 8\n")
    with pytest.raises(ConfigError, match="SHA-256"):
        _load(folder, remote_code_sha256=hashes)


@pytest.mark.parametrize("name", ["../secret.py", "absent.py"])
def test_a_permitted_name_must_be_a_file_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_target(tmp_path / "t")
    with pytest.raises(ConfigError, match="no file of"):
        load_target(TargetConfig(model=str(folder), remote_code_sha256={name: "0" * 64}))


def test_code_of_another_repository_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t", tokenizer_config={"auto_map": {"AutoTokenizer": ["someone/else--code.Own", None]}})
    with pytest.raises(ConfigError, match="another repository"):
        _load(folder)
