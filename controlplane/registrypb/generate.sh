#!/bin/bash
# Makes the Go code of this directory from its .proto files, with Debian's protoc and
# the plugins of tools/go.mod. A test of the package sees that what is committed is what
# comes out.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-.}
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
go build -modfile=tools/go.mod -o "$bin/" google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
# The versions of compiler and plugins stand in the output's comments; only the
# plugins' are pinned, so the compiler's is taken out.
protoc --plugin="$bin/protoc-gen-go" --plugin="$bin/protoc-gen-go-grpc" \
	--go_out="$out" --go_opt=module=aether --go-grpc_out="$out" --go-grpc_opt=module=aether \
	controlplane/registrypb/registry.proto controlplane/registrypb/registrar.proto
sed -i -e '/^\/\/ \t*-* *protoc  *v/d' -e '/^\/\/ - protoc  *v/d' "$out"/controlplane/registrypb/*.pb.go
