package main

import (
	"strings"
	"testing"
)

// TestFlags: combinations that make no sense say so.
func TestFlags(t *testing.T) {
	r := []string{"r:8443"}
	for _, tt := range []struct {
		o    options
		want string // in the error; empty: none
		dir  string // of the pods
		pods string // what --cluster-pods comes to; empty: off
	}{
		{options{}, "--node", "", ""},
		{options{node: "n1"}, "--config, --registrar or --kubernetes", "", ""},
		{options{node: "n1", config: "d"}, "", "", ""},
		{options{node: "../n1", config: "d"}, "--node", "", ""},
		{options{node: "n1/x", config: "d"}, "--node", "", ""},
		{options{node: "n1", config: "d", udsDir: "/run/aether/uds"}, "", "", ""},
		{options{node: "n1", config: "d", udsDir: "run/uds"}, "--uds-dir", "", ""},
		{options{node: "n1", config: "d", udsDir: "/run/../uds"}, "--uds-dir", "", ""},
		{options{node: "n1", config: "d", udsDir: "/run/uds/"}, "--uds-dir", "", ""},
		{options{node: "n1", config: "d", podsDir: "p"}, "--pods-dir is of no use", "", ""},
		{options{node: "n1", config: "d", registrarInsecure: true}, "--registrar-insecure is of no use", "", ""},
		{options{node: "n1", config: "d", registrarWhole: true}, "--registrar-whole is of no use", "", ""},
		{options{node: "n1", registrar: []string{"r:8443"}}, "--state-dir", "", ""},
		{options{node: "n1", registrar: []string{"r:8443"}, stateDir: "/s"}, "", "/s/pods/n1", ""},
		{options{node: "n1", registrar: []string{"r:8443"}, stateDir: "/s", podsDir: "/p"}, "", "/p", ""},
		{options{node: "n1", registrar: []string{"r:8443"}, stateDir: "/s", registrarInsecure: true}, "not on the loopback", "", ""},
		{options{node: "n1", registrar: []string{"127.0.0.1:8443"}, stateDir: "/s", registrarInsecure: true}, "", "/s/pods/n1", ""},
		{options{node: "n1", config: "d", nodeForm: "/node/{node}"}, "--node-spiffe-id is of no use", "", ""},
		{options{node: "n1", config: "d", identities: []string{"/app"}}, "--allow-spiffe-id is of no use", "", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", identities: []string{"app"}}, "--allow-spiffe-id", "", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", identities: []string{"/app/*"}}, "", "/s/pods/n1", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", nodeForm: "/node/{node}"}, "", "/s/pods/n1", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", nodeForm: "/node/n1"}, "--node-spiffe-id", "", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", nodeForm: "node/{node}"}, "--node-spiffe-id", "", ""},
		{options{node: "n1", registrar: []string{"127.0.0.1:1"}, stateDir: "/s", registrarInsecure: true, nodeForm: "/node/{node}"}, "no use with --registrar-insecure", "", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", healthSock: "/" + strings.Repeat("d", maxHealthDir-1) + "/health.sock"}, "", "/s/pods/n1", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", healthSock: "/" + strings.Repeat("d", maxHealthDir) + "/health.sock"}, "--health-sock", "", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", kubernetes: true}, "", "/s/pods/n1", podsEvict},
		{options{node: "n1", registrar: r, stateDir: "/s", kubeconfig: "k"}, "", "/s/pods/n1", podsEvict},
		{options{node: "n1", registrar: r, stateDir: "/s", kubernetes: true, config: "d"}, "", "/s/pods/n1", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", kubernetes: true, config: "d", clusterPods: "watch"}, "", "/s/pods/n1", podsWatch},
		{options{node: "n1", registrar: r, stateDir: "/s", kubernetes: true, config: "d", clusterPods: "evict"}, "write watch", "", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", kubernetes: true, clusterPods: "off"}, "", "/s/pods/n1", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", kubernetes: true, clusterPods: "on"}, "is none of off, watch and evict", "", ""},
		{options{node: "n1", registrar: r, stateDir: "/s", clusterPods: "watch"}, "needs --registrar", "", ""},
		{options{node: "n1", kubernetes: true, clusterPods: "evict"}, "needs --registrar", "", ""},
		{options{node: "n1", config: "d", clusterPods: "off"}, "", "", ""},
		{options{node: "n1", kubernetes: true}, "", "", ""},
	} {
		err := tt.o.checkSources()
		if tt.pods == "" {
			tt.pods = podsOff
		}
		switch {
		case tt.want == "" && (err != nil || tt.o.podsDir != tt.dir || tt.o.clusterPods != tt.pods):
			t.Errorf("%+v: %v, pods in %q, want %q, and %s", tt.o, err, tt.o.podsDir, tt.dir, tt.pods)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%+v: %v, want %q", tt.o, err, tt.want)
		}
	}
}

// TestNodeID: who a node is to registrars.
func TestNodeID(t *testing.T) {
	for _, tt := range []struct{ form, node, want, fault string }{
		{"", "n1", "spiffe://td.example/ns/aether-system/sa/aether-agent", ""},
		{"/node/{node}", "n1", "spiffe://td.example/node/n1", ""},
		{"spiffe://nodes.example/{node}", "n1", "spiffe://nodes.example/n1", ""},
		{"/node/{node}", "n 1", "", "--node"},
	} {
		o := options{node: tt.node, nodeAccount: "aether-system/aether-agent", trustDomain: "td.example", nodeForm: tt.form}
		id, err := o.nodeID()
		if (err == nil) != (tt.fault == "") || err == nil && id.String() != tt.want || err != nil && !strings.Contains(err.Error(), tt.fault) {
			t.Errorf("%q of %s: %s, %v, want %s %s", tt.form, tt.node, id, err, tt.want, tt.fault)
		}
	}
}
