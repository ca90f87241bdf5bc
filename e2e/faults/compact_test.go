package faults

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/server/storetest"
	"aether/e2e/rig"
)

const (
	tapAddr  = "127.0.0.1:2479"
	etcdAddr = "127.0.0.1:2379"
)

// tap stands between the registrar and etcd, on their node, and can be shut.
type tap struct {
	mu    sync.Mutex
	shut  bool
	conns map[net.Conn]bool
}

func newTap(w *world) *tap {
	p := &tap{conns: map[net.Conn]bool{}}
	node := &w.Rig.Nodes[0].Space
	w.must(w.ServeTCP(w.ctx, node, tapAddr, func(from *net.TCPConn) {
		to, err := node.Dial(context.Background(), "tcp", etcdAddr)
		if err != nil || !p.add(from) {
			return
		}
		defer p.remove(from)
		var both sync.WaitGroup
		both.Go(func() { _, _ = io.Copy(to, from); to.Close() })
		both.Go(func() { _, _ = io.Copy(from, to); from.Close() })
		both.Wait()
	}))
	return p
}

func (p *tap) add(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = true
	return !p.shut
}

func (p *tap) remove(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

func (p *tap) set(shut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shut = shut
	for c := range p.conns {
		c.Close()
	}
}

// awaitCatalog returns once each node knows so many names without their rows.
func (w *world) awaitCatalog(want []int) {
	w.t.Helper()
	for node, names := range want {
		w.must(rig.Until(w.ctx, func(ctx context.Context) error {
			s, err := w.registrarOf(ctx, node)
			if err == nil && s.Counts.Catalog != names {
				err = fmt.Errorf("node %d knows %d names without rows, waited for %d", node+1, s.Counts.Catalog, names)
			}
			return err
		}))
	}
}

// compacted: another region's registrar writes and removes while this one is cut off, and
// etcd forgets how that came about. Then it is known all the same, and requests have gone on.
func compacted(w *world) {
	var names, more []int // without the service that comes, and with it
	for node := range w.Rig.Nodes {
		s, err := w.registrarOf(w.ctx, node)
		w.must(err)
		names, more = append(names, s.Counts.Catalog), append(more, s.Counts.Catalog+1)
	}
	l := w.begin()
	l.more(rps)
	const key = "/aether/v1/regions/other/clusters/other/ns/shop/services/%s/protocols/PROTOCOL_HTTP/endpoints/10.7.0.%d" // contract 9.5
	row := func(ip int) []byte {
		b, err := proto.Marshal(storetest.HTTP(fmt.Sprintf("10.7.0.%d", ip), "far"))
		w.must(err)
		return b
	}
	for _, comes := range []bool{true, false} { // and what came during the first cut goes during the second
		w.tap.set(true)
		for ip := 1; ip < 6; ip++ {
			value := row(ip)
			if !comes {
				value = nil
			}
			w.must(w.PutKey(w.ctx, fmt.Sprintf(key, "stock", ip), value))
		}
		w.must(w.Compact(w.ctx))
		l.more(rps)
		w.tap.set(false)
		if comes {
			w.awaitCatalog(more)
		} else {
			w.awaitCatalog(names)
		}
	}
	l.more(rps)
	l.check("compacted")
}
