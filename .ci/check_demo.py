"""Check the result of the quick demo: every phase finished, nothing lost, no reply wrong, the draft is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(run: Path) -> None:
    manifests = sorted(run.rglob("manifest.json"))
    stages = set()
    for path in manifests:
        manifest = json.loads(path.read_text())
        counts = manifest["counts"]
        assert counts["in"] == counts["done"] + counts["rejected"] + counts["pending"], f"{path}: {counts}"
        assert counts["pending"] == 0, f"{path}: {counts}"
        stages.add(manifest["stage"])
    print(f"{len(manifests)} manifests of stages {sorted(stages)} add up")

    results = json.loads((run / "benchmark" / "results.json").read_text())
    outputs = results["outputs"]
    assert outputs["checked"] > 0, outputs
    assert outputs["checked"] == outputs["identical"] + outputs["tie"] + outputs["wrong"], outputs
    assert outputs["wrong"] == 0, outputs
    assert results["accept_length"]["overall"] > 1.0, results["accept_length"]
    assert results["predicted_accept_length"] > 1.0, results
    for name in ("config.json", "model.safetensors"):
        assert (run / "draft" / "export" / name).is_file(), name
    html = (run / "report.html").read_text()
    assert "<svg" in html, "report.html has no plot"
    assert "http://" not in html.replace("http://www.w3.org", ""), "report.html reaches for the network"
    print(f"accept length {results['accept_length']['overall']:.3f}, outputs {outputs}, speed-up {results['speedup']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
