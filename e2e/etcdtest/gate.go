package etcdtest

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Gate forwards TCP to an address while it is open: a network between a client and a
// server, which can fail. Safe for concurrent use.
type Gate struct {
	addr string

	mu    sync.Mutex
	to    string
	ln    net.Listener // nil: shut
	conns map[net.Conn]struct{}
	all   sync.WaitGroup
}

// NewGate makes an open gate in front of to. It is shut with the test.
func NewGate(t testing.TB, to string) *Gate {
	t.Helper()
	g := &Gate{to: to, addr: newIP() + ":0", conns: map[net.Conn]struct{}{}}
	if err := g.Open(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Shut(); g.all.Wait() })
	return g
}

// Addr is where clients come to, open or shut.
func (g *Gate) Addr() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.addr
}

// Open lets connections through; an open gate stays so.
func (g *Gate) Open() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ln != nil {
		return nil
	}
	ln, err := net.Listen("tcp", g.addr)
	if err != nil {
		return err
	}
	g.ln, g.addr = ln, ln.Addr().String()
	g.all.Go(func() { g.accept(ln) })
	return nil
}

// Shut cuts every connection, and refuses new ones until Open.
func (g *Gate) Shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ln != nil {
		g.ln.Close()
		g.ln = nil
	}
	for c := range g.conns {
		c.Close()
	}
}

// Lead leads to another address from now on, and cuts what leads to the old one.
func (g *Gate) Lead(to string) {
	g.mu.Lock()
	g.to = to
	g.mu.Unlock()
	g.Cut()
}

// Cut cuts every connection that there is; new ones are let through.
func (g *Gate) Cut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		c.Close()
	}
}

func (g *Gate) accept(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		g.all.Go(func() { g.forward(ln, c) })
	}
}

func (g *Gate) forward(ln net.Listener, from net.Conn) {
	defer from.Close()
	g.mu.Lock()
	addr := g.to
	g.mu.Unlock()
	to, err := net.Dial("tcp", addr)
	if err != nil {
		return
	}
	defer to.Close()
	g.mu.Lock()
	if g.ln != ln || g.to != addr { // shut meanwhile, or led elsewhere
		g.mu.Unlock()
		return
	}
	g.conns[from], g.conns[to] = struct{}{}, struct{}{}
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		delete(g.conns, from)
		delete(g.conns, to)
		g.mu.Unlock()
	}()
	var both sync.WaitGroup
	both.Go(func() { _, _ = io.Copy(to, from); to.Close(); from.Close() })
	both.Go(func() { _, _ = io.Copy(from, to); to.Close(); from.Close() })
	both.Wait()
}
