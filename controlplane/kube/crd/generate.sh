#!/bin/bash
# Makes the CustomResourceDefinitions of this directory from the Go types in
# controlplane/gamma/config.go. A test of the package sees that what is committed is
# what comes out. The generator has a go.mod of its own, for its requirements are no
# affair of the mesh's.
set -euo pipefail
cd "$(dirname "$0")"
out=$(realpath "${1:-.}")
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
(cd tool && go build -o "$bin/" sigs.k8s.io/controller-tools/cmd/controller-gen)
cd ../../..
"$bin/controller-gen" crd:allowDangerousTypes=true paths=./controlplane/gamma output:crd:dir="$out"
