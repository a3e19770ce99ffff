"""A kubectl that keeps the manifests that were applied."""

import sys

import cloud


def main(argv):
    """Answer get jobset and apply."""
    cloud.record("kubectl", argv)
    with cloud.state() as value:
        if value["script"].get("kubectl_error"):
            cloud.fail(value["script"]["kubectl_error"])
    if argv[:2] == ["get", "jobset"]:
        (name,), _ = cloud.parse("get", argv[2:], ("--output",), (), ("--output",), (1, 1))
        if not (cloud.ROOT / f"jobset.{name}").exists():
            cloud.fail(f'Error from server (NotFound): jobsets.jobset.x-k8s.io "{name}" not found')
        print(f"jobset.jobset.x-k8s.io/{name}")
    elif argv[:1] == ["apply"]:
        _, flags = cloud.parse("apply", argv[1:], ("--filename",), (), ("--filename",))
        with open(flags["--filename"]) as file:
            text = file.read()
        name = text.split("kind: JobSet")[1].split('name: "')[1].split('"')[0]
        (cloud.ROOT / f"jobset.{name}").write_text(text)
        print(f"jobset.jobset.x-k8s.io/{name} created")
    else:
        cloud.refuse("kubectl: unknown command")


if __name__ == "__main__":
    main(sys.argv[1:])
