# Everything a developer does often. `make help` lists it.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Runs of each fuzz target (by count: golang/go#75804), and the longest that a package's tests may take, of which
# those that need a server may wait for its build.
FUZZTIME     ?= 20000x
TEST_TIMEOUT ?= 40m
# Questions of soak-decide, and the seed of soaks (e2e/testseed).
CASES        ?= 1000000
SEED         ?= random
# Meshes of soak-invalid.
MESHES       ?= 16000
# Relays that relays opens: at 9,000 the test's own limit of 20,000 files is near.
RELAYS       ?= 6000
# Requests of soak-retry.
CUTS         ?= 50000
# How long soak-blocking takes.
SOAK         ?= 1h
# Rounds of soak-converge, and how long soak-away keeps the API server away.
ROUNDS       ?= 60
AWAY         ?= 3m

START := $(shell date +%s)

# What tests say of how much they looked at (e2e/counts) is shown at the end, with the time that it took.
COUNTED = counts=$$(mktemp); trap 'rm -f "$$counts"' EXIT; export AETHER_TEST_COUNTS=$$counts; \
	 took() { sort "$$counts" >&2; [ "$${CI:-}" = true ] || echo "make $$1: $$2 after $$(($$(date +%s) - $(START))) s"; }

.PHONY: help
help: ## Show this help
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.PHONY: setup
setup: ## Install what tests, demo and benchmarks need (Debian packages)
	@e2e/setup.sh

.PHONY: build
build: ## Build the binaries into bin/
	@mkdir -p bin
	go build -trimpath -o bin/ ./cmd/...

.PHONY: servers
servers: ## Build the servers that tests run (etcd, kube-apiserver) into the user's cache, once
	@go run ./e2e/prebuild

.PHONY: demo
demo: setup build ## Show the mesh at work here: two nodes, capture, mTLS (root; KEEP=1 leaves it running, REGISTRY=etcd runs it over a registrar and a real etcd)
	@bin/aetherctl demo $(if $(KEEP),--keep) $(if $(REGISTRY),--registry $(REGISTRY))
	@echo "make demo: done after $$(($$(date +%s) - $(START))) s"

# Nothing of it is taken from the test cache: what the end-to-end tests run is a binary, which the cache does not see.
# CI runs everything at full strength, in go test's own words (docs/decisions/068-two-strengths-of-tests.md).
.PHONY: test
test: setup build ## Install, build, and run every test, tier by tier, with fewer repetitions than test-full (root)
	@$(COUNTED); \
	 if [ "$${CI:-}" = true ]; then \
		if AETHER_FULL=1 go test -race -count=1 -timeout $(TEST_TIMEOUT) ./...; then took test passed; else took test FAILED; exit 1; fi; \
	 elif go run ./e2e/tiers -timeout $(TEST_TIMEOUT); then took test passed; else took test FAILED; exit 1; fi

.PHONY: test-full
test-full: setup build lint checkptr fuzz ## All that CI runs: every test at full strength with the race detector, lint, checkptr, fuzz (root)
	@$(COUNTED); \
	 if go run ./e2e/tiers -full -timeout $(TEST_TIMEOUT); then took test-full passed; else took test-full FAILED; exit 1; fi

.PHONY: checkptr
checkptr: ## Run the packages that talk to the kernel with their pointers checked (with the race detector they always are)
	go test -count=1 -gcflags=-d=checkptr ./dataplane/reactor/... ./tproxy/socket/...

.PHONY: mutants
mutants: ## Break the decision core on purpose, and see each break noticed
	go test -count=1 -v -timeout $(TEST_TIMEOUT) ./e2e/mutants

.PHONY: e2e
e2e: setup build ## Run the end-to-end tests alone, with their log (root)
	go test -race -count=1 -timeout $(TEST_TIMEOUT) -v ./e2e/...

.PHONY: e2e-handover
e2e-handover: setup build ## Replace each node's proxy ten times under 1,000 calls a second (root)
	go test -count=1 -timeout $(TEST_TIMEOUT) -v ./e2e/netns -run '^TestHandOver$$' -replacements 10

.PHONY: e2e-roll
e2e-roll: setup ## Roll three services under 250 requests a second (the tests: 100) (root)
	go test -count=1 -timeout $(TEST_TIMEOUT) -v ./e2e/life -run '^TestRoll(Kubernetes)?$$' -roll-rate 250

.PHONY: lint
lint: ## Check format, vet, staticcheck, known vulnerabilities
	@bad=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); \
	 if [ -n "$$bad" ]; then echo "not formatted (gofmt -w mends it):"; echo "$$bad"; exit 1; fi
	go vet ./...
	go tool -modfile=tools/go.mod staticcheck ./...
	@out=$$(timeout 300 go tool -modfile=tools/go.mod govulncheck ./... 2>&1) && rc=0 || rc=$$?; \
	 case "$$rc,$$out" in \
	 0,*) echo "govulncheck: no known vulnerability is reached" ;; \
	 124,*|*"fetching vulnerabilities"*) echo "govulncheck: not checked, its database cannot be reached from here: $${out##*: }" ;; \
	 *) echo "$$out"; exit 1 ;; \
	 esac

# One instrumented binary a package: to link one for each target takes longer than to run it.
.PHONY: fuzz
fuzz: ## Run every fuzz target, FUZZTIME times each (20000x)
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; cache=$$(go env GOCACHE)/fuzz/aether; n=0; \
	 for dir in $$(grep -rlE --include='*_test.go' '^func Fuzz' . | xargs -n 1 dirname | sort -u); do \
		go test -c -fuzz . -o "$$tmp/fuzz.test" "$$dir"; \
		for func in $$(grep -hoE '^func Fuzz[A-Za-z0-9_]*' "$$dir"/*_test.go | cut -c 6- | sort); do \
			(cd "$$dir" && "$$tmp/fuzz.test" -test.run '^$$' -test.fuzz "^$$func\$$" -test.fuzztime $(FUZZTIME) -test.fuzzcachedir "$$cache/$$dir") >"$$tmp/out" 2>&1 || { cat "$$tmp/out"; exit 1; }; \
			echo "$$dir $$func: $$(grep -oE 'execs: [0-9]+' "$$tmp/out" | tail -n 1)"; \
			n=$$((n + 1)); \
		done; \
	 done; \
	 echo "$$n fuzz targets, $(FUZZTIME) runs each, no finding"

.PHONY: soak-decide
soak-decide: ## Hold decisions against the reference, CASES times (1000000); SEED repeats a run
	AETHER_SEED=$(SEED) go test -count=1 -timeout 0 -v ./dataplane/decide/reference -run '^TestSoak$$' -cases $(CASES)

.PHONY: soak-invalid
soak-invalid: ## Make one thing of a mesh invalid and see that nothing is let through by it, in MESHES meshes (16000, some 10 million questions); SEED repeats a run
	AETHER_SEED=$(SEED) go test -count=1 -timeout 0 -v ./controlplane/compile -run '^TestInvalidNeverWidens$$' -meshes $(MESHES)

.PHONY: relays
relays: setup ## Open RELAYS raw-TCP relays at once (6000; the tests: 1,500) and see them gone again (root)
	AETHER_RELAYS=$(RELAYS) go test -count=1 -timeout $(TEST_TIMEOUT) -v ./e2e/netns -run '^TestOpenRelays$$'

.PHONY: soak-retry
soak-retry: ## Cut requests and connections anywhere, CUTS times (50000), and see none doubled or lost; SEED repeats a run
	AETHER_SEED=$(SEED) go test -race -count=1 -timeout 0 -v ./dataplane -run '^TestCuts$$' -cuts $(CUTS)

.PHONY: soak-converge
soak-converge: ## Hold nodes over a real API server against what contract 9.6 says, in ROUNDS random histories (60; the tests: 2, at full strength 3); SEED repeats a run
	AETHER_SEED=$(SEED) go test -race -count=1 -timeout 0 -v ./controlplane/kubestore -run '^TestConvergence$$' -converge $(ROUNDS)

.PHONY: soak-away
soak-away: setup ## Keep the API server away for AWAY (3m; the tests: seconds), three times, under traffic (root)
	go test -race -count=1 -timeout 0 -v ./e2e/faults -run '^TestKubernetesFaults$$' -away $(AWAY)

.PHONY: soak-blocking
soak-blocking: setup ## Hold --blocking adapt against safe for SOAK (1h), with the collector at work and the machine busy (root)
	go test -run '^$$' -bench . -benchtime 1x -timeout 0 ./bench/soak -soak $(SOAK)

.PHONY: bench
bench: setup ## Compare with the peers side by side, shortly (root)
	go test -run '^$$' -bench ./bench -timeout 30m

.PHONY: bench-full
bench-full: setup ## The same with more and longer rounds (root)
	AETHER_BENCH_FULL=1 go test -run '^$$' -bench ./bench -timeout 120m

.PHONY: bench-fairness
bench-fairness: setup ## Show what a neighbour notices of a pod that does its worst (root)
	go test -run '^$$' -bench . -benchtime 1x -timeout 10m ./bench/fairness

.PHONY: bench-registrar
bench-registrar: ## Measure the registrar: 3,000 services, 100,000 endpoints, 1,000 nodes
	AETHER_BENCH_FULL=1 go test -run '^$$' -bench Registrar -benchtime 1x -timeout 20m ./bench/registrar
	AETHER_BENCH_FULL=1 go test -run '^$$' -bench Floor -benchtime 1x -timeout 20m ./bench/registrar

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin
