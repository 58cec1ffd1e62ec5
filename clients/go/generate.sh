#!/usr/bin/env bash
# Generates gen/ from the protos two folders up; needs buf (PyPI buf-bin, or on PATH) and Go. --check fails on drift.
set -euo pipefail
cd "$(dirname "$0")"
root=../..
buf=$(command -v "$root/.venv/bin/buf" || command -v buf)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
GOBIN="$work" go install google.golang.org/protobuf/cmd/protoc-gen-go
GOBIN="$work" go install google.golang.org/grpc/cmd/protoc-gen-go-grpc
PATH="$work:$PATH" "$buf" generate "$root/proto" --path "$root/proto/dualclaw/v1" --template buf.gen.yaml -o "$work"
if [ "${1:-}" = --check ]; then
  diff -r "$work/gen" gen
else
  rm -rf gen && cp -r "$work/gen" gen
fi
