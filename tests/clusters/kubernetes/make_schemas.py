"""Make crds.json, the JSON schemas of what `trainwright submit --to kubernetes` writes, from the projects' own CRDs.

    python tests/clusters/kubernetes/make_schemas.py CRD.yaml ...

All of them are published under the Apache License 2.0:
- github.com/kubernetes-sigs/jobset, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
- github.com/kubeflow/trainer, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml and ..._trainingruntimes.yaml
- github.com/kubeflow/training-operator (release-1.9), manifests/base/crds/kubeflow.org_pytorchjobs.yaml

Descriptions and extensions of OpenAPI are left out, and what occurs several times is written once. Where a structural
schema names properties, others are not allowed: the API server would drop them without a word.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
_KEPT = {"type", "enum", "pattern", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength", "required"}
_KEPT |= {"minProperties", "maxProperties"}
_SHORTEST_SHARED = 80  # characters


def main() -> None:
    """Write crds.json."""
    found = {}
    for name in sys.argv[1:]:
        crd = yaml.safe_load(Path(name).read_text(encoding="utf-8"))["spec"]
        for version in crd["versions"]:
            schema = converted(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            found[f"{crd['group']}/{version['name']}/{crd['names']['kind']}"] = schema
    text = json.dumps(shared(found), separators=(",", ":"), sort_keys=True)
    (HERE / "crds.json").write_text(text + "\n", encoding="utf-8")


def converted(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema as JSON schema."""
    found = {key: value for key, value in schema.items() if key in _KEPT}
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if "properties" in schema:
        found["properties"] = {key: converted(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = converted(schema["additionalProperties"])
    if "items" in schema:
        found["items"] = converted(schema["items"])
    return found


def shared(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas in one document, with what occurs several times under $defs."""
    counts: Counter[str] = Counter()
    _count(schemas, counts)
    names = {
        text: f"s{number}"
        for number, (text, count) in enumerate(counts.items())
        if count > 1 and len(text) > _SHORTEST_SHARED
    }
    definitions = {name: _replaced(json.loads(text), names, top=True) for text, name in names.items()}
    return {"$defs": definitions, **{kind: _replaced(schema, names, top=True) for kind, schema in schemas.items()}}


def _count(value: Any, counts: Counter[str]) -> None:
    if isinstance(value, dict):
        if "type" in value and not isinstance(value["type"], dict):
            text = json.dumps(value, sort_keys=True)
            counts[text] += 1
            if counts[text] > 1:
                return
        for each in value.values():
            _count(each, counts)


def _replaced(value: Any, names: dict[str, str], top: bool = False) -> Any:
    if not isinstance(value, dict):
        return value
    text = json.dumps(value, sort_keys=True)
    if not top and text in names:
        return {"$ref": f"#/$defs/{names[text]}"}
    return {key: _replaced(each, names) for key, each in value.items()}


if __name__ == "__main__":
    main()
