"""The chatterbox adapter without a process: files, voices, complaints."""

from __future__ import annotations

from pathlib import Path

from runtimes.chatterbox.adapter import ChatterboxAdapter, ChatterboxConfig
from tests.support.chatterbox import checkpoint, clip

ADAPTER = ChatterboxAdapter()


class TestAdapter:
    """`check` names missing files and voices."""

    def config(self, folder, **keys) -> ChatterboxConfig:
        return ChatterboxConfig(runtime="chatterbox", path=str(folder), **keys)

    def test_problems(self, tmp_path):
        folder = checkpoint(tmp_path / "model", "default")
        check = lambda **keys: " ".join(ADAPTER.check(self.config(folder, **keys), runtimes_dir=Path()))
        assert "there is no voice" in check()
        (folder / "conds.pt").touch()
        assert check() == ""
        assert "lacks t3_turbo_v1.safetensors, s3gen_meanflow.safetensors" in check(variant="turbo")
        assert "there is no such folder" in check(voices=str(tmp_path / "none"))
        clip(tmp_path / "voices" / "anna.wav", 0.1)
        assert "default_voice: there is no voice 'eve'; there are anna, default" in check(
            voices=str(tmp_path / "voices"), default_voice="eve"
        )
        assert "no such folder" in " ".join(ADAPTER.check(self.config(tmp_path / "no"), runtimes_dir=Path()))

    def test_language(self, tmp_path):
        folder = checkpoint(tmp_path / "model", "multilingual")
        (folder / "conds.pt").touch()

        def check(language: str, variant: str = "multilingual") -> str:
            found = ADAPTER.check(self.config(folder, variant=variant, default_language=language), runtimes_dir=Path())
            return " ".join(found)

        assert [check(good) for good in ("de", "zh", "German", "pt-BR")] == [""] * 4
        assert "default_language: 'cs' can't be spoken by variant multilingual; it must be one of ar, da" in check("cs")
        assert "did you mean sv, Swedish?" in check("Sweedish")
        assert "default_language: 'de' can't be spoken by variant default; it must be one of en" in check(
            "de", "default"
        )

    def test_listeners(self, tmp_path):
        assert ADAPTER.target_inflight(self.config(tmp_path)) == 8
        assert ADAPTER.target_inflight(self.config(tmp_path, target_inflight=1)) == 1

    def test_estimate(self, tmp_path):
        folder = checkpoint(tmp_path / "model", "default")
        assert ADAPTER.estimate(self.config(folder)).source == "computed"
        (folder / "s3gen.safetensors").unlink()
        assert ADAPTER.estimate(self.config(folder)) is None
