package dataplane

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"

	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/inbound"
	"aether/dataplane/outbound"
	"aether/tproxy/socket"
)

// TestDrainNamesTheLastRequestInTime: that a pod's kernel rules take long to go, here for ever, does not keep HTTP/2 clients
// from being told which request was the last: what has been taken has to be answered before the limit.
func TestDrainNamesTheLastRequestInTime(t *testing.T) {
	e, err := engine.New(engine.Config{MaxLoops: 1})
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{log: slog.New(slog.DiscardHandler), engine: e}
	n.out, n.in = outbound.New(outbound.Config{Store: &n.store}), inbound.New(inbound.Config{Store: &n.store})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer func() { cancel(); wg.Wait() }()
	wg.Go(func() { e.Run(ctx) })

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	served, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := socket.TakeFD(served.(*net.TCPConn))
	if err != nil {
		t.Fatal(err)
	}
	pod := e.AddPod("web")
	l := pod.Home()
	err = l.Post(func() {
		if err := l.ServeHTTP2(fd, nil, &engine.ConnInfo{Pod: pod, Loop: l, Pool: &exchange.Pool{}}, nil); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(client, oracle.ClientPreface); err != nil {
		t.Fatal(err)
	}
	framer := oracle.NewFramer(client, client)
	if err := framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	client.SetReadDeadline(time.Now().Add(30 * time.Second))
	goAway := func() (last uint32, err error) {
		for {
			f, err := framer.ReadFrame()
			if err != nil {
				return 0, err
			}
			if f, ok := f.(*oracle.GoAwayFrame); ok {
				return f.LastStreamID, nil
			}
		}
	}

	drained := make(chan struct{})
	wg.Go(func() {
		defer close(drained)
		n.Drain(ctx, 2*time.Second)
	})
	if last, err := goAway(); err != nil || last != 1<<31-1 {
		t.Fatalf("the warning: last stream %d, %v", last, err)
	}
	n.mu.Lock() // as whoever changes the pods' rules has it
	last, err := goAway()
	select {
	case <-drained:
		err = errors.Join(err, errors.New("the drain has ended before accepting has"))
	default:
	}
	n.mu.Unlock()
	if err != nil || last != 0 {
		t.Errorf("last stream %d, %v", last, err)
	}
	<-drained
}
