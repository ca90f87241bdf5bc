package dataplane

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/engine"
	"aether/dataplane/inbound"
	"aether/dataplane/listen"
	"aether/dataplane/model"
	"aether/dataplane/outbound"
	"aether/mtls"
)

// TestCertificatesAreNotWaitedForLong: who takes over waits five seconds for its pods' certificates, and then serves those
// that have none, too.
func TestCertificatesAreNotWaitedForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		served := 0
		n := &Node{
			cfg: Config{Owner: &listen.Owner{}}, log: slog.New(slog.DiscardHandler), certs: mtls.NewStore(mtls.Config{}),
			pods: map[string]*pod{"c1": {listen: func() error { served++; return nil }}}, problems: map[string]model.Problem{},
			held: true, applied: true, ctx: t.Context(), news: make(chan struct{}, 1), synced: make(chan struct{}),
		}
		start := time.Now()
		if err := n.Open(t.Context()); err != nil || served != 1 {
			t.Errorf("%d pods are served, %v", served, err)
		}
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("after %v", took)
		}
	})
}

// TestStuckLoop: whoever asks a node what it carries is told which loop does not answer, and a drain ends without it.
func TestStuckLoop(t *testing.T) {
	e, err := engine.New(engine.Config{MaxLoops: 1})
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{log: slog.New(slog.DiscardHandler), engine: e}
	n.out, n.in = outbound.New(outbound.Config{Store: &n.store}), inbound.New(inbound.Config{Store: &n.store})
	ctx, cancel := context.WithCancel(t.Context())
	gate, stuck := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	defer func() { close(gate); cancel(); wg.Wait() }()
	wg.Go(func() { e.Run(ctx) })
	if err := e.Loops()[0].Post(func() { close(stuck); <-gate }); err != nil {
		t.Fatal(err)
	}
	<-stuck
	done := make(chan string)
	for name, ask := range map[string]func() (silent int){
		"connections": func() int { return len(n.Connections(ctx, "", 10).Silent) },
		"sessions":    func() int { return len(n.Sessions(ctx, "", 10).Silent) },
		"endpoints":   func() int { return len(n.Endpoints(ctx, "", 10).Silent) },
		"services":    func() int { return 1 - len(n.Used(ctx)) },
		"drain":       func() int { n.Drain(ctx, time.Millisecond); return 1 },
	} {
		go func() {
			if silent := ask(); silent != 1 {
				t.Errorf("%s: %d loops do not answer", name, silent)
			}
			done <- name
		}()
	}
	late := time.After(time.Minute)
	for range 5 {
		select {
		case <-done:
		case <-late:
			t.Fatal("it waits for the loop")
		}
	}
}

// TestHandOverOfAStuckLoop: sockets are handed over without a loop that does not run, and the error names the pods whose own of them
// stay open; while it waits, the node answers.
func TestHandOverOfAStuckLoop(t *testing.T) {
	e, err := engine.New(engine.Config{MaxLoops: 1})
	if err != nil {
		t.Fatal(err)
	}
	owner := &listen.Owner{}
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	f, err := ln.File()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(int(f.Fd()))
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	k := listen.Key{Container: "c1", Role: listen.Mesh}
	if _, _, err := owner.Get(k, func() (int, error) { return fd, nil }); err != nil {
		t.Fatal(err)
	}
	n := &Node{log: slog.New(slog.DiscardHandler), engine: e, cfg: Config{Owner: owner}, pods: map[string]*pod{}}
	for c, name := range map[string]string{"c1": "web-1", "c2": "api-1"} {
		n.pods[c] = &pod{engine: e.AddPod(c), w: model.Workload{Namespace: "shop", Name: name, ContainerID: c}}
	}
	ctx, cancel := context.WithCancel(t.Context())
	gate, stuck := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	defer func() { cancel(); wg.Wait(); owner.Close() }()
	wg.Go(func() { e.Run(ctx) })
	if err := e.Loops()[0].Post(func() { close(stuck); <-gate }); err != nil {
		t.Fatal(err)
	}
	<-stuck
	over := make(chan error, 1)
	go func() { over <- n.HandOver() }()
	free := make(chan struct{})
	go func() { // the lock is free while the loop is waited for
		for gone := false; !gone; {
			n.mu.Lock()
			gone = n.gone
			n.mu.Unlock()
		}
		close(free)
	}()
	late := time.After(30 * time.Second)
	select {
	case <-free:
	case err := <-over:
		t.Errorf("it held the lock to its end: %v", err)
	case <-late:
		t.Error("the node is locked")
	}
	select {
	case err = <-over:
		if err == nil || !strings.Contains(err.Error(), "(shop/api-1, shop/web-1)") {
			t.Errorf("%v, want the pods' names", err)
		}
		if keys := owner.Keys(); len(keys) != 1 {
			t.Errorf("%v are open, want the socket that the loop has", keys)
		}
	case <-late:
		t.Error("it waits for the loop")
	}
	close(gate)
	if err := n.HandOver(); err != nil || len(owner.Keys()) != 0 { // the loop runs: nothing is left
		t.Errorf("%v, %v", err, owner.Keys())
	}
}
