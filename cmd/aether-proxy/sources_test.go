package main

import (
	"strings"
	"testing"
)

// TestFlags: combinations that make no sense say so.
func TestFlags(t *testing.T) {
	for _, tt := range []struct {
		o    options
		want string // in the error; empty: none
		dir  string // of the pods
	}{
		{options{}, "--node", ""},
		{options{node: "n1"}, "--config, --registrar or --kubernetes", ""},
		{options{node: "n1", config: "d"}, "", ""},
		{options{node: "../n1", config: "d"}, "--node", ""},
		{options{node: "n1/x", config: "d"}, "--node", ""},
		{options{node: "n1", config: "d", podsDir: "p"}, "--pods-dir is of no use", ""},
		{options{node: "n1", config: "d", registrarInsecure: true}, "--registrar-insecure is of no use", ""},
		{options{node: "n1", config: "d", registrarWhole: true}, "--registrar-whole is of no use", ""},
		{options{node: "n1", registrar: []string{"r:8443"}}, "--state-dir", ""},
		{options{node: "n1", registrar: []string{"r:8443"}, stateDir: "/s"}, "", "/s/pods/n1"},
		{options{node: "n1", registrar: []string{"r:8443"}, stateDir: "/s", podsDir: "/p"}, "", "/p"},
		{options{node: "n1", registrar: []string{"r:8443"}, stateDir: "/s", registrarInsecure: true}, "not on the loopback", ""},
		{options{node: "n1", registrar: []string{"127.0.0.1:8443"}, stateDir: "/s", registrarInsecure: true}, "", "/s/pods/n1"},
	} {
		err := tt.o.checkSources()
		switch {
		case tt.want == "" && (err != nil || tt.o.podsDir != tt.dir):
			t.Errorf("%+v: %v, pods in %q, want %q", tt.o, err, tt.o.podsDir, tt.dir)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%+v: %v, want %q", tt.o, err, tt.want)
		}
	}
}
