package main

import (
	"slices"
	"strings"
)

// tier is a part of the tests: the packages of one `go test`.
type tier struct {
	name  string
	race  bool // with the race detector
	paths []string
}

// pure are packages whose tests have no socket and no clock that counts (rows 0 to 3 of e2e/presubmit): the servers
// that later tiers run are built beside them.
var pure = []string{
	"controlplane/endpointmeta", "controlplane/registry", "controlplane/registrypb",
	"dataplane/authz", "dataplane/balance", "dataplane/decide", "dataplane/hpack", "dataplane/http1", "dataplane/http2",
	"dataplane/httpmsg", "dataplane/model", "dataplane/model/modeltest", "dataplane/plain", "dataplane/snapshot",
	"mtls/spiffeid", "sniff", "sniff/replay", "tproxy/rules",
}

// heavy are the packages below which the race detector costs a default run most. They come last: they need servers or
// the machine for themselves. A full run has the race detector on them too.
var heavy = []string{
	"cmd", "bench", "e2e",
	"controlplane/compile", "controlplane/etcd", "controlplane/file", "controlplane/kube", "controlplane/kubestore",
	"controlplane/registrar/client", "controlplane/registrar/services",
	"dataplane/decide/reference", "dataplane/engine",
}

// heavyAlone are heavy without what is below them.
var heavyAlone = []string{"dataplane"}

// plan divides the packages of the module, given below its path, into tiers: each package is in exactly one.
func plan(packages []string, full bool) []tier {
	tiers := []tier{
		{name: "pure", race: true},
		{name: "sockets", race: true},
		{name: "heavy", race: full},
	}
	for _, p := range packages {
		i := 1
		switch {
		case slices.Contains(pure, p):
			i = 0
		case p == "" || slices.Contains(heavyAlone, p) || slices.ContainsFunc(heavy, func(h string) bool { return p == h || strings.HasPrefix(p, h+"/") }):
			i = 2
		}
		tiers[i].paths = append(tiers[i].paths, p)
	}
	return slices.DeleteFunc(tiers, func(t tier) bool { return len(t.paths) == 0 })
}
