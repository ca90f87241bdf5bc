package file

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"aether/controlplane/input"
	"aether/dataplane/model"
)

// settled is a Sink that tells on which settings it has heard.
type settled struct{ said chan input.Batch }

func (s *settled) Replace(b input.Batch) { s.said <- b }
func (s *settled) Apply(b input.Batch)   { s.said <- b }
func (s *settled) Report(input.Status)   {}

// TestFeedSettings (contract 10.9): the switches of spec.proxy are the mesh's, or a namespace's; a MeshConfig that is
// refused says what it said before, and before it has said anything takes nothing from what was known.
func TestFeedSettings(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path+".tmp", []byte("apiVersion: config.aether.io/v1\nkind: MeshConfig\n"+text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".tmp", path); err != nil {
			t.Fatal(err)
		}
	}
	const mesh, shop = "metadata: {name: default, namespace: aether-system}\n", "metadata: {name: default, namespace: shop}\n"
	write("mesh.yaml", mesh+"spec: {sameNode: both}")
	base := input.Settings{AccessLogs: true, AccessLogSuccess: 100}
	sink := &settled{said: make(chan input.Batch, 16)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Feed(ctx, dir, Options{Node: "n1"}, base, sink) }()
	next := func(what string) input.Batch {
		t.Helper()
		select {
		case b := <-sink.said:
			return b
		case err := <-done:
			t.Fatalf("%s: %v", what, err)
		case <-time.After(time.Minute):
			t.Fatalf("%s: nothing is told", what)
		}
		panic("unreachable")
	}
	if b := next("refused from the start"); b.Settings != nil || !b.KeepSettings || len(b.Problems) != 1 {
		t.Errorf("refused from the start: %+v", b)
	}
	write("mesh.yaml", mesh+"spec: {sameNode: inProcess, proxy: {accessLogsEnabled: false, accessLogSuccessSampleRate: 7}}")
	if b := next("good"); b.Settings == nil || *b.Settings != (input.Settings{SameNode: model.InProcess, AccessLogSuccess: 7}) {
		t.Errorf("good: %+v", b.Settings)
	}
	write("shop.yaml", shop+"spec: {proxy: {emitStatsPod: true}}")
	if b := next("a namespace's"); b.Settings != nil || len(b.Namespaces["shop"]) != 1 || !b.Namespaces["shop"][0].Apply(base).EmitStatsPod || len(b.Problems) != 0 {
		t.Errorf("a namespace's: %+v", b)
	}
	write("shop.yaml", shop+"spec: {proxy: {emitStatsPod: 1}}")
	if b := next("both refused"); b.Settings != nil || len(b.Namespaces) != 0 || len(b.Problems) != 1 {
		t.Errorf("a namespace's, refused: %+v", b)
	}
	write("mesh.yaml", mesh+"spec: {sameNode: both}")
	if b := next("refused"); b.Settings != nil || len(b.Namespaces) != 0 || len(b.Problems) != 1 {
		t.Errorf("refused: %+v", b)
	}
	for _, f := range []string{"mesh.yaml", "shop.yaml"} {
		if err := os.Remove(filepath.Join(dir, f)); err != nil {
			t.Fatal(err)
		}
	}
	var settings *input.Settings
	for left := 2; left > 0; { // together, or one after the other
		b := next("gone")
		if b.Settings != nil {
			settings = b.Settings
			left--
		}
		if o, there := b.Namespaces["shop"]; there && len(o) == 0 {
			left--
		}
	}
	if *settings != base {
		t.Errorf("gone: %+v", *settings)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
