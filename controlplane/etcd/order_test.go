package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/e2e/etcdtest"
	"aether/e2e/testseed"
)

// stated is a row as a node states it.
func stated(ip, node string, at uint64, classes ...registrypb.PortProtocol) *registrypb.ServiceEndpoint {
	e := row(ip, fmt.Sprint(at), classes...)
	e.KubernetesMetadata, e.Stated = &registrypb.ServiceEndpoint_KubernetesMetadata{NodeName: node}, at
	return e
}

// Decision 032: what a node has said later stays, all of it, whoever writes what it said
// before; and so does what another node has said since, when a pod is taken out.
func TestLaterStatement(t *testing.T) {
	server := etcdtest.Start(t)
	c := server.Client()
	s, other := newStore(t, Config{Endpoints: []string{server.Endpoint()}}), newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	const at = "local/clusters/local/ns/shop/services/cart/protocols/"
	v, _ := follow(t, s)
	v.until("the list", func() bool { return v.wholes == 1 && v.told == 1 && v.err == nil })
	put(t, other, cart, stated("10.0.0.1", "a", 5, http, tcp))
	for name, err := range map[string]error{
		"an earlier row":            s.Put(t.Context(), cart, stated("10.0.0.1", "a", 4)),
		"of another class":          s.Put(t.Context(), cart, stated("10.0.0.1", "a", 4, udp)),
		"an earlier removal":        s.Delete(t.Context(), cart, "10.0.0.1", registry.Statement{Node: "a", Stated: 4}),
		"a removal by another node": s.Delete(t.Context(), cart, "10.0.0.1", registry.Statement{Node: "b", Stated: 9}),
	} {
		if !errors.Is(err, registry.ErrOutdated) {
			t.Errorf("%s: %v", name, err)
		}
	}
	wants(t, c, at+"PROTOCOL_HTTP/endpoints/10.0.0.1", at+"PROTOCOL_TCP/endpoints/10.0.0.1")
	position := s.Position()
	there, err := c.Get(t.Context(), registry.Root+at+"PROTOCOL_TCP/endpoints/10.0.0.1")
	if err != nil || position.Revision != there.Kvs[0].ModRevision {
		t.Errorf("%v: the position is %d, and what is there instead of %v", err, position.Revision, there)
	}
	v.until("what is there instead is shown", func() bool { return s.Shown(position) && len(v.rows) == 2 })

	put(t, s, cart, stated("10.0.0.1", "a", 5, http, tcp)) // again
	put(t, s, cart, stated("10.0.0.1", "a", 6, udp))
	wants(t, c, at+"PROTOCOL_UDP/endpoints/10.0.0.1")
	put(t, s, cart, stated("10.0.0.1", "b", 1)) // another node's clock is another
	wants(t, c, at+"PROTOCOL_HTTP/endpoints/10.0.0.1")
	put(t, s, cart, row("10.0.0.1", "x", tcp)) // whoever does not say when
	wants(t, c, at+"PROTOCOL_TCP/endpoints/10.0.0.1")
	put(t, s, cart, stated("10.0.0.1", "b", 1))
	raw(t, c, registry.Root+at+"PROTOCOL_QUIC/endpoints/10.0.0.1", "of a newer version")
	if err := s.Delete(t.Context(), cart, "10.0.0.1", registry.Statement{Node: "b", Stated: 2}); err != nil {
		t.Error(err)
	}
	wants(t, c)
}

// Several replicas at once, in any order: what stands in the end was said last.
func TestStatementsAtOnce(t *testing.T) {
	server := etcdtest.Start(t)
	const replicas, statements = 3, 60
	classes := [][]registrypb.PortProtocol{{http}, {tcp}, {http, tcp}, {udp, http}}
	queues := make([][]uint64, replicas)
	for i, at := range testseed.Rand(t).Perm(statements) {
		queues[i%replicas] = append(queues[i%replicas], uint64(at+1))
	}
	var all sync.WaitGroup
	for _, queue := range queues {
		s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
		all.Go(func() {
			for _, at := range queue {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				for {
					err := s.Put(ctx, cart, stated("10.0.0.1", "a", at, classes[at%4]...))
					if err == nil || errors.Is(err, registry.ErrOutdated) {
						break
					}
					if ctx.Err() != nil {
						t.Errorf("%d: %v", at, err)
						break
					}
				}
				cancel()
			}
		})
	}
	all.Wait()
	want := stated("10.0.0.1", "a", statements, classes[statements%4]...)
	found := 0
	for _, k := range keys(t, server.Client()) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		got, err := server.Client().Get(ctx, registry.Root+k)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		e := &registrypb.ServiceEndpoint{}
		if err := proto.Unmarshal(got.Kvs[0].Value, e); err != nil || !proto.Equal(e, want) {
			t.Errorf("%s: %v, %v", k, e, err)
		}
		found++
	}
	if found != len(registry.Protocols(want)) {
		t.Errorf("%d rows, want %d", found, len(registry.Protocols(want)))
	}
}
