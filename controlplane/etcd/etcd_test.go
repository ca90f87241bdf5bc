package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/e2e/counts"
	"aether/e2e/etcdtest"
	"aether/e2e/rig"
	"aether/e2e/testseed"
)

// patience bounds what a test waits for: the machine may be busy, and a store that
// comes back is tried again after up to four seconds in these tests.
const patience = time.Minute

var cart = model.ServiceName{Namespace: "shop", Name: "cart"}

// row is a valid row of a pod; version makes two of them differ.
func row(ip, version string, classes ...registrypb.PortProtocol) *registrypb.ServiceEndpoint {
	e := &registrypb.ServiceEndpoint{Ip: ip, ClusterName: "c1", Port: 8080, Weight: 1024, PortProtocols: map[uint32]registrypb.PortProtocol{},
		Metadata: map[string]string{"version": version}}
	if len(classes) == 0 {
		classes = []registrypb.PortProtocol{registrypb.PortProtocol_PORT_PROTOCOL_HTTP}
	}
	for i, c := range classes {
		e.Ports = append(e.Ports, uint32(8080+i))
		e.PortProtocols[uint32(8080+i)] = c
	}
	return e
}

const (
	http = registrypb.PortProtocol_PORT_PROTOCOL_HTTP
	tcp  = registrypb.PortProtocol_PORT_PROTOCOL_TCP
	udp  = registrypb.PortProtocol_PORT_PROTOCOL_UDP
)

func newStore(t *testing.T, cfg Config) *Store {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// view is what a follower of a store knows, as a text a row, and what it was told on the way.
type view struct {
	t *testing.T

	mu      sync.Mutex
	changed chan struct{} // closed and replaced with each change or report
	rows    map[string]string
	wholes  int
	gone    int // rows that were taken away by name
	seen    func(key, text string)
	err     error
	told    int // reports
	ended   chan struct{}
}

// follow watches s until the test ends or cancel is called.
func follow(t *testing.T, s *Store) (*view, context.CancelFunc) {
	t.Helper()
	v := &view{t: t, changed: make(chan struct{}), rows: map[string]string{}, ended: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer close(v.ended)
		if err := s.Watch(ctx, v.on, v.report); !errors.Is(err, context.Canceled) {
			t.Errorf("Watch ended with %v", err)
		}
	}()
	end := func() { cancel(); <-v.ended }
	t.Cleanup(end)
	return v, end
}

func key(r registry.Row) string {
	return fmt.Sprintf("%s/%s %s %s %s", r.Region, r.Cluster, r.Service, r.Protocol, r.IP)
}

func text(e *registrypb.ServiceEndpoint) string {
	return fmt.Sprint(e.GetIp(), e.GetPorts(), e.GetHealth(), e.GetMetadata()["version"])
}

func (v *view) on(c registry.Change) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c.Whole {
		v.wholes++
		clear(v.rows)
	} else if v.wholes == 0 {
		v.t.Error("what changes came before the whole")
	}
	if c.Version == "" {
		v.t.Error("a change without a version")
	}
	for _, r := range c.Rows {
		if r.Endpoint == nil {
			if _, known := v.rows[key(r)]; !known {
				v.t.Errorf("%s is taken away, and was not there", key(r))
			}
			v.gone++
			delete(v.rows, key(r))
			continue
		}
		v.rows[key(r)] = text(r.Endpoint)
		if v.seen != nil {
			v.seen(key(r), text(r.Endpoint))
		}
	}
	v.tell()
}

func (v *view) report(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.err = err
	v.told++
	v.tell()
}

func (v *view) tell() {
	close(v.changed)
	v.changed = make(chan struct{})
}

// until waits until cond holds, which is asked with the view locked.
func (v *view) until(what string, cond func() bool) {
	v.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		v.mu.Lock()
		ok, changed := cond(), v.changed
		if !ok {
			select {
			case <-late.C:
				defer v.mu.Unlock()
				v.t.Fatalf("not in time: %s; err %v, %d wholes, rows:\n%s", what, v.err, v.wholes, strings.Join(dump(v.rows), "\n"))
			default:
			}
		}
		v.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-late.C:
			late.Reset(0)
		}
	}
}

// check asks for what holds now.
func (v *view) check(f func()) {
	v.t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	f()
}

func dump(rows map[string]string) (out []string) {
	for _, k := range slices.Sorted(maps.Keys(rows)) {
		out = append(out, k+": "+rows[k])
	}
	return out[:min(len(out), 40)]
}

// has waits until exactly these rows are there: "shop/cart PROTOCOL_HTTP 10.0.0.1", in the partition local/local.
func (v *view) has(want ...string) {
	v.t.Helper()
	v.until(fmt.Sprintf("rows %q", want), func() bool {
		if len(v.rows) != len(want) {
			return false
		}
		for _, w := range want {
			if _, there := v.rows["local/local "+w]; !there {
				return false
			}
		}
		return true
	})
}

// again does what a store that is coming back may refuse for a while.
func again(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := rig.Until(ctx, f); err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, s *Store, n model.ServiceName, e *registrypb.ServiceEndpoint) {
	t.Helper()
	again(t, func(ctx context.Context) error { return s.Put(ctx, n, e) })
}

func remove(t *testing.T, s *Store, n model.ServiceName, ip string) {
	t.Helper()
	again(t, func(ctx context.Context) error { return s.Delete(ctx, n, ip, registry.Statement{}) })
}

func raw(t *testing.T, c *clientv3.Client, key, value string) {
	t.Helper()
	again(t, func(ctx context.Context) error { _, err := c.Put(ctx, key, value); return err })
}

func keys(t *testing.T, c *clientv3.Client) (out []string) {
	t.Helper()
	again(t, func(ctx context.Context) error {
		r, err := c.Get(ctx, "/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			return err
		}
		out = nil
		for _, kv := range r.Kvs {
			out = append(out, strings.TrimPrefix(string(kv.Key), registry.Root))
		}
		return nil
	})
	return out
}

// wants holds the keys of the store against contract 9.5.
func wants(t *testing.T, c *clientv3.Client, want ...string) {
	t.Helper()
	if got := keys(t, c); !slices.Equal(got, want) {
		t.Errorf("the store has %q,\nwant %q", got, want)
	}
}

// Contract 9.4 and 9.5: a row stands under each class that it serves, in the own
// partition alone; what it no longer serves goes in the same transaction; a pod's
// removal takes it from every protocol directory there is.
func TestWrite(t *testing.T) {
	server := etcdtest.Start(t)
	c := server.Client()
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}, Region: "eu", Cluster: "c1"})
	const at = "eu/clusters/c1/ns/shop/services/cart/protocols/"
	const other = "us/clusters/c1/ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/10.0.0.1"
	raw(t, c, registry.Root+other, "x")

	put(t, s, cart, row("10.0.0.1", "1", http, tcp))
	put(t, s, cart, row("10.0.0.2", "1"))
	wants(t, c, at+"PROTOCOL_HTTP/endpoints/10.0.0.1", at+"PROTOCOL_HTTP/endpoints/10.0.0.2", at+"PROTOCOL_TCP/endpoints/10.0.0.1", other)
	e := row("10.0.0.1", "2", tcp)
	e.UdpPorts = []uint32{8080}
	put(t, s, cart, e)
	wants(t, c, at+"PROTOCOL_HTTP/endpoints/10.0.0.2", at+"PROTOCOL_TCP/endpoints/10.0.0.1", at+"PROTOCOL_UDP/endpoints/10.0.0.1", other)
	r, err := c.Get(t.Context(), registry.Root+at+"PROTOCOL_UDP/endpoints/10.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	var got registrypb.ServiceEndpoint
	if err := proto.Unmarshal(r.Kvs[0].Value, &got); err != nil || !proto.Equal(&got, e) {
		t.Errorf("%v: the value is %v, want %v", err, &got, e)
	}

	raw(t, c, registry.Root+at+"PROTOCOL_QUIC/endpoints/10.0.0.1", "of a newer version")
	raw(t, c, registry.Root+at+"PROTOCOL_TCP-X/endpoints/10.0.0.1", "sorts before PROTOCOL_TCP/")
	raw(t, c, registry.Root+at+"no directory", "")
	remove(t, s, cart, "10.0.0.1")
	wants(t, c, at+"PROTOCOL_HTTP/endpoints/10.0.0.2", at+"no directory", other)
	remove(t, s, cart, "10.0.0.1") // what is not there is no error
	remove(t, s, model.ServiceName{Namespace: "shop", Name: "nobody"}, "10.0.0.1")

	for name, err := range map[string]error{
		"an invalid row":             s.Put(t.Context(), cart, &registrypb.ServiceEndpoint{Ip: "10.0.0.3", ClusterName: "c1"}),
		"a class of a newer version": s.Put(t.Context(), cart, row("10.0.0.3", "1", 77)),
		"half a name":                s.Put(t.Context(), model.ServiceName{Namespace: "shop"}, row("10.0.0.3", "1")),
		"another's name":             s.Put(t.Context(), model.ServiceName{Namespace: "shop", Name: "../x"}, row("10.0.0.3", "1")),
		"no address":                 s.Delete(t.Context(), cart, "10.0.0.2/../x", registry.Statement{}),
	} {
		if err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	wants(t, c, at+"PROTOCOL_HTTP/endpoints/10.0.0.2", at+"no directory", other)
}

// The whole first, then every change, of every partition; what the store has of other
// kinds is no row.
func TestWatch(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	west := newStore(t, Config{Endpoints: []string{server.Endpoint()}, Region: "west", Cluster: "c2"})
	put(t, s, cart, row("10.0.0.1", "1"))
	put(t, west, cart, row("10.0.0.1", "1", tcp))
	raw(t, server.Client(), registry.Root+"west/clusters/c2/exports/cart", "shop")
	v, _ := follow(t, s)
	v.until("the list", func() bool { return v.wholes == 1 && v.told == 1 && v.err == nil })
	v.until("two rows", func() bool {
		return maps.Equal(v.rows, map[string]string{
			"local/local shop/cart PROTOCOL_HTTP 10.0.0.1": text(row("10.0.0.1", "1")), "west/c2 shop/cart PROTOCOL_TCP 10.0.0.1": text(row("10.0.0.1", "1", tcp)),
		})
	})
	remove(t, west, cart, "10.0.0.1")
	put(t, s, cart, row("10.0.0.1", "2", udp))
	put(t, s, cart, row("fd00::1", "1"))
	v.has("shop/cart PROTOCOL_UDP 10.0.0.1", "shop/cart PROTOCOL_HTTP fd00::1")
	for f, n := range s.Skipped {
		if n.Value() != 0 {
			t.Errorf("%d left out: %s", n.Value(), f)
		}
	}
	v.check(func() {
		if v.wholes != 1 || s.Breaks.Value() != 0 {
			t.Errorf("%d wholes, %d breaks", v.wholes, s.Breaks.Value())
		}
	})
}

// Whether the watch has come as far as a write is known, so that nobody takes its silence
// for an answer.
func TestPosition(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	put(t, s, cart, row("10.0.0.1", "1"))
	before := s.Position()
	listed, change, goOn := make(chan struct{}), make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Watch(ctx, func(c registry.Change) {
			if c.Whole {
				listed <- struct{}{}
				return
			}
			change <- struct{}{}
			<-goOn
		}, func(error) {})
	}()
	defer func() { cancel(); <-done }()
	<-listed
	put(t, s, cart, row("10.0.0.1", "2"))
	at := s.Position()
	<-change
	if s.Shown(at) {
		t.Error("shown before the watch has said it")
	}
	put(t, s, cart, row("10.0.0.1", "3"))
	next := s.Position()
	close(goOn)
	<-change
	if !s.Shown(at) || !s.Shown(before) {
		t.Errorf("what the watch has said is not shown: %v, and %v from before it began", s.Shown(at), s.Shown(before))
	}
	again(t, func(context.Context) error {
		if !s.Shown(next) {
			return errors.New("the last one is not shown")
		}
		return nil
	})
}

// What is written right after the list, before the watch has begun, is heard; what was
// in the list is not heard twice.
func TestNothingBetweenListAndWatch(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	put(t, s, cart, row("10.0.0.1", "1"))
	put(t, s, cart, row("10.0.0.2", "1"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var heard []string
	err := s.Watch(ctx, func(c registry.Change) {
		for _, r := range c.Rows {
			heard = append(heard, fmt.Sprintf("%v %s %v", c.Whole, r.IP, r.Endpoint != nil))
		}
		switch {
		case c.Whole: // the next two revisions, and the last
			remove(t, s, cart, "10.0.0.1")
			put(t, s, cart, row("10.0.0.3", "1"))
			put(t, s, cart, row("10.0.0.4", "1"))
		case slices.ContainsFunc(c.Rows, func(r registry.Row) bool { return r.IP == "10.0.0.4" }):
			cancel()
		}
	}, func(error) {})
	if want := []string{"true 10.0.0.1 true", "true 10.0.0.2 true", "false 10.0.0.1 false", "false 10.0.0.3 true", "false 10.0.0.4 true"}; !slices.Equal(heard, want) {
		t.Errorf("%v: heard %q, want %q", err, heard, want)
	}
}

// Configs reads what clusters export: from every partition, and says what the key says.
func TestConfigs(t *testing.T) {
	server := etcdtest.Start(t)
	s, c := newStore(t, Config{Endpoints: []string{server.Endpoint()}}), server.Client()
	value, err := proto.Marshal(&registrypb.ServiceConfigProjection{Service: "forged/name", OriginCluster: "forged", Version: "7"})
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []struct{ region, cluster, service string }{{"eu", "c1", "cart"}, {"eu", "c10", "web"}, {"us", "c1", "cart"}} {
		k, err := registry.Key{Kind: registry.ConfigKey, Region: at.region, Cluster: at.cluster, Service: model.ServiceName{Namespace: "shop", Name: at.service}}.Text()
		if err != nil {
			t.Fatal(err)
		}
		raw(t, c, k, string(value))
	}
	raw(t, c, registry.Root+"eu/clusters/c1/config/***", string(value))
	raw(t, c, registry.Root+"no partition", "")
	put(t, s, cart, row("10.0.0.1", "1"))
	list, err := s.Configs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range list {
		got = append(got, p.GetOriginCluster()+" "+p.GetService()+" "+p.GetVersion())
	}
	if want := []string{"c1 shop/cart 7", "c10 shop/web 7", "c1 shop/cart 7"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if n := s.Skipped[registry.BadKey].Value(); n != 1 {
		t.Errorf("%d bad keys, want 1", n)
	}
}

// kill -9: what is known stays as it is, the report says that and why, and what happened
// meanwhile is there afterwards.
func TestKilledAndRestarted(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	put(t, s, cart, row("10.0.0.1", "1"))
	put(t, s, cart, row("10.0.0.2", "1"))
	v, _ := follow(t, s)
	v.until("well", func() bool { return v.told > 0 && v.err == nil })
	server.Kill()
	v.until("a report", func() bool { return v.err != nil })
	v.check(func() {
		if len(v.rows) != 2 || !strings.Contains(v.err.Error(), server.Endpoint()) {
			t.Errorf("%d rows, %v", len(v.rows), v.err)
		}
	})
	server.Restart()
	put(t, s, cart, row("10.0.0.3", "1"))
	remove(t, s, cart, "10.0.0.1")
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.2", "shop/cart PROTOCOL_HTTP 10.0.0.3")
	v.until("well", func() bool { return v.err == nil })
}

// A server that stops dead without a word is noticed, and another one is followed.
func TestPaused(t *testing.T) {
	all := etcdtest.Cluster(t, 3)
	s := newStore(t, Config{Endpoints: []string{all[0].Endpoint(), all[1].Endpoint(), all[2].Endpoint()}})
	put(t, s, cart, row("10.0.0.1", "1"))
	v, _ := follow(t, s)
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.1")
	etcdtest.Leader(t, all).Pause()
	put(t, s, cart, row("10.0.0.2", "1"))
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.1", "shop/cart PROTOCOL_HTTP 10.0.0.2")
}

// Changes that are no longer kept when the store is reached again are made up for by a list.
func TestCompactedWhileAway(t *testing.T) {
	server := etcdtest.Start(t)
	gate := etcdtest.NewGate(t, server.Addr())
	near := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	s := newStore(t, Config{Endpoints: []string{"http://" + gate.Addr()}})
	put(t, near, cart, row("10.0.0.1", "1"))
	put(t, near, cart, row("10.0.0.2", "1"))
	v, _ := follow(t, s)
	v.until("well", func() bool { return v.told > 0 && v.err == nil })
	gate.Shut()
	v.until("a report", func() bool { return v.err != nil })
	remove(t, near, cart, "10.0.0.1")
	for i := range 20 {
		put(t, near, cart, row("10.0.0.2", fmt.Sprint(i)))
	}
	compact(t, server.Client())
	if err := gate.Open(); err != nil {
		t.Fatal(err)
	}
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.2")
	put(t, near, cart, row("10.0.0.3", "1"))
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.2", "shop/cart PROTOCOL_HTTP 10.0.0.3")
}

func compact(t *testing.T, c *clientv3.Client) {
	t.Helper()
	again(t, func(ctx context.Context) error {
		r, err := c.Get(ctx, "x")
		if err == nil {
			_, err = c.Compact(ctx, r.Header.Revision, clientv3.WithCompactPhysical())
		}
		if err != nil && strings.Contains(err.Error(), "compacted") {
			return nil // by one who was faster
		}
		return err
	})
}

// A watch that begins behind what is kept says so, and is a list's matter.
func TestWatchBehindCompaction(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	put(t, s, cart, row("10.0.0.1", "1"))
	put(t, s, cart, row("10.0.0.1", "2"))
	put(t, s, cart, row("10.0.0.1", "3"))
	c, err := s.conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Get(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	compact(t, c)
	f := &follower{s: s, on: func(registry.Change) { t.Error("something was heard") }, report: func(error) {}}
	if err := f.watch(t.Context(), c, point{r.Header.ClusterId, 1}); !errors.Is(err, errCompacted) {
		t.Errorf("%v, want errCompacted", err)
	}
}

// Three members: the leader is killed while rows are written. No row is missed, and
// none is taken away for it.
func TestLeaderKilled(t *testing.T) {
	all := etcdtest.Cluster(t, 3)
	ends := []string{all[0].Endpoint(), all[1].Endpoint(), all[2].Endpoint()}
	s := newStore(t, Config{Endpoints: ends})
	v, _ := follow(t, s)
	v.until("well", func() bool { return v.told > 0 && v.err == nil })
	var want []string
	for i := range 60 {
		if i == 20 {
			etcdtest.Leader(t, all).Kill()
		}
		ip := fmt.Sprintf("10.0.0.%d", i+1)
		put(t, s, cart, row(ip, "1"))
		want = append(want, "shop/cart PROTOCOL_HTTP "+ip)
	}
	v.has(want...)
	v.until("well", func() bool { return v.err == nil })
	v.check(func() {
		if v.gone != 0 {
			t.Errorf("%d rows were taken away", v.gone)
		}
	})
}

// Without a majority there is no telling what is true: it is reported, nothing changes,
// and it goes on by itself.
func TestNoMajority(t *testing.T) {
	all := etcdtest.Cluster(t, 3)
	s := newStore(t, Config{Endpoints: []string{all[0].Endpoint()}})
	put(t, s, cart, row("10.0.0.1", "1"))
	v, _ := follow(t, s)
	v.until("well", func() bool { return v.told > 0 && v.err == nil })
	all[1].Kill()
	all[2].Kill()
	v.until("a report", func() bool { return v.err != nil })
	if err := s.Put(t.Context(), cart, row("10.0.0.2", "1")); err == nil {
		t.Error("a row was written without a majority")
	}
	v.check(func() {
		if len(v.rows) != 1 {
			t.Errorf("%d rows, want 1", len(v.rows))
		}
	})
	all[1].Restart()
	put(t, s, cart, row("10.0.0.3", "1"))
	v.until("the new row", func() bool { _, there := v.rows["local/local shop/cart PROTOCOL_HTTP 10.0.0.3"]; return there })
	v.until("well", func() bool { return v.err == nil })
}

// fill writes twenty pods of a service, and says what a view then has.
func fill(t *testing.T, s *Store) (want []string) {
	for i := range 20 {
		ip := fmt.Sprintf("10.0.0.%d", i+1)
		put(t, s, cart, row(ip, "1"))
		want = append(want, "shop/cart PROTOCOL_HTTP "+ip)
	}
	return want
}

// A store that comes back empty takes nothing away: that is reported, what is written is
// in force, an address that is another's now is given up, and all that comes again is
// as it was.
func TestEmptied(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}, Grace: time.Hour})
	want := fill(t, s)
	v, _ := follow(t, s)
	v.has(want...)
	server.Kill()
	server.Wipe()
	server.Restart()
	put(t, s, model.ServiceName{Namespace: "pay", Name: "api"}, row("10.0.0.1", "1"))
	want[0] = "pay/api PROTOCOL_HTTP 10.0.0.1"
	v.has(want...)
	v.until("a loud report", func() bool { return v.err != nil && strings.Contains(v.err.Error(), "rows that it had are kept until") })
	v.check(func() {
		if v.wholes != 1 || v.gone != 1 || s.Withheld.Value() < 19 {
			t.Errorf("%d wholes, %d rows taken away, %d withheld", v.wholes, v.gone, s.Withheld.Value())
		}
	})
	for i := 2; i <= 20; i++ {
		v.check(func() {
			if v.err == nil {
				t.Fatalf("all is well with %d rows missing", 21-i)
			}
		})
		put(t, s, cart, row(fmt.Sprintf("10.0.0.%d", i), "2"))
	}
	v.until("well", func() bool { return v.err == nil })
	v.has(want...)
	v.check(func() {
		if v.gone != 1 {
			t.Errorf("%d rows were taken away, want 1", v.gone)
		}
	})
	remove(t, s, cart, "10.0.0.2") // and a removal is one again
	v.has(slices.Delete(want, 1, 2)...)
}

// What stays away for the whole grace is believed to be gone.
func TestEmptiedForGood(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}, Grace: time.Second})
	want := fill(t, s)
	v, _ := follow(t, s)
	v.has(want...)
	server.Kill()
	server.Wipe()
	server.Restart()
	v.has()
	v.until("well", func() bool { return v.err == nil })
	v.check(func() {
		if s.Withheld.Value() != 20 || v.gone != 20 || v.wholes != 1 {
			t.Errorf("%d withheld, %d taken away, %d wholes", s.Withheld.Value(), v.gone, v.wholes)
		}
	})
}

// A store that was set back to a backup keeps what it has lost since, and what it has
// of old is what it says.
func TestSetBack(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}, Grace: time.Hour})
	put(t, s, cart, row("10.0.0.1", "old"))
	put(t, s, cart, row("10.0.0.9", "was removed after the backup"))
	server.Kill()
	backup := server.Save()
	server.Restart()
	remove(t, s, cart, "10.0.0.9")
	put(t, s, cart, row("10.0.0.1", "new"))
	put(t, s, cart, row("10.0.0.2", "new"))
	v, _ := follow(t, s)
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.1", "shop/cart PROTOCOL_HTTP 10.0.0.2")
	server.Kill()
	server.Load(backup)
	server.Restart()
	v.until("a loud report", func() bool { return v.err != nil && strings.Contains(v.err.Error(), "set back") })
	// The watch goes on from there: one that waits for the old revision would hear nothing.
	put(t, s, cart, row("10.0.0.3", "new"))
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.1", "shop/cart PROTOCOL_HTTP 10.0.0.2", "shop/cart PROTOCOL_HTTP 10.0.0.3", "shop/cart PROTOCOL_HTTP 10.0.0.9")
	v.check(func() {
		if got := v.rows["local/local shop/cart PROTOCOL_HTTP 10.0.0.1"]; got != text(row("10.0.0.1", "old")) {
			t.Errorf("the row that the store has is %s", got)
		}
	})
	v.check(func() {
		if v.gone != 0 {
			t.Errorf("%d rows were taken away", v.gone)
		}
	})
}

// What else a store that has lost rows looks like, when it is reached again: nothing is
// taken away at once, and the report says what was found.
func TestLostWhileAway(t *testing.T) {
	for _, tt := range []struct {
		name string
		lose func(t *testing.T, near *Store, gate *etcdtest.Gate)
		says string // empty: nothing is amiss
		gone int
	}{
		{"all rows, in its own history", func(t *testing.T, near *Store, _ *etcdtest.Gate) {
			for i := range 20 {
				remove(t, near, cart, fmt.Sprintf("10.0.0.%d", i+1))
			}
		}, "the store is empty, and had 20 rows", 0},
		{"most of them", func(t *testing.T, near *Store, _ *etcdtest.Gate) {
			for i := range 18 {
				remove(t, near, cart, fmt.Sprintf("10.0.0.%d", i+1))
			}
		}, "the store has lost 18 of 20 rows at once", 0},
		{"half of them, which is a roll", func(t *testing.T, near *Store, _ *etcdtest.Gate) {
			for i := range 10 {
				remove(t, near, cart, fmt.Sprintf("10.0.0.%d", i+1))
			}
		}, "", 10},
		{"another cluster's", func(t *testing.T, _ *Store, gate *etcdtest.Gate) {
			other := etcdtest.Start(t)
			s := newStore(t, Config{Endpoints: []string{other.Endpoint()}})
			for i := range 19 { // it has more revisions, and lacks one row
				put(t, s, cart, row(fmt.Sprintf("10.0.0.%d", i+1), "1"))
				put(t, s, cart, row(fmt.Sprintf("10.0.0.%d", i+1), "1"))
			}
			gate.Lead(other.Addr())
		}, "another cluster's", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := etcdtest.Start(t)
			gate := etcdtest.NewGate(t, server.Addr())
			near := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
			s := newStore(t, Config{Endpoints: []string{"http://" + gate.Addr()}, Grace: time.Hour})
			want := fill(t, near)
			v, _ := follow(t, s)
			v.has(want...)
			v.until("well", func() bool { return v.told > 0 && v.err == nil })
			gate.Shut()
			v.until("a report", func() bool { return v.err != nil })
			tt.lose(t, near, gate)
			if err := gate.Open(); err != nil {
				t.Fatal(err)
			}
			if tt.says == "" {
				v.has(want[tt.gone:]...)
				v.until("well", func() bool { return v.err == nil })
				return
			}
			v.until(tt.says, func() bool { return v.err != nil && strings.Contains(v.err.Error(), tt.says) })
			v.has(want...)
		})
	}
}

func TestRetryPause(t *testing.T) {
	for n := range 40 {
		for range 100 {
			if d := retryPause(n); d < retryMin || d > retryMax || n > 4 && d < retryMax/2 || n == 0 && d > 2*retryMin {
				t.Fatalf("after %d failures %v", n, d)
			}
		}
	}
}

// Users and passwords: without, nothing is read and the report says why; with, all works,
// also after a restart, when old tokens mean nothing.
func TestAuth(t *testing.T) {
	server := etcdtest.Start(t)
	c := server.Client()
	ctx := t.Context()
	for _, f := range []func() error{
		func() error { _, err := c.RoleAdd(ctx, "root"); return err },
		func() error { _, err := c.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := c.RoleAdd(ctx, "mesh"); return err },
		func() error {
			_, err := c.RoleGrantPermission(ctx, "mesh", registry.Root, clientv3.GetPrefixRangeEnd(registry.Root), clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func() error { _, err := c.UserAdd(ctx, "registrar", "password"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "registrar", "mesh"); return err },
		func() error { _, err := c.AuthEnable(ctx); return err },
	} {
		if err := f(); err != nil {
			t.Fatal(err)
		}
	}
	for name, cfg := range map[string]Config{"no user": {}, "a wrong password": {User: "registrar", Password: "x"}} {
		t.Run(name, func(t *testing.T) {
			cfg.Endpoints = []string{server.Endpoint()}
			s := newStore(t, cfg)
			if err := s.Put(ctx, cart, row("10.0.0.1", "1")); err == nil {
				t.Error("a row was written")
			}
			v, end := follow(t, s)
			v.until("a report", func() bool { return v.err != nil })
			end()
			if v.wholes != 0 {
				t.Error("something was listed")
			}
		})
	}
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}, User: "registrar", Password: "password"})
	put(t, s, cart, row("10.0.0.1", "1"))
	v, _ := follow(t, s)
	v.until("well", func() bool { return v.told > 0 && v.err == nil })
	server.Kill()
	server.Restart()
	put(t, s, cart, row("10.0.0.2", "1"))
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.1", "shop/cart PROTOCOL_HTTP 10.0.0.2")
}

// TLS on both sides, from files; a client without a certificate, or one that does not
// trust the server, gets nothing.
func TestTLS(t *testing.T) {
	server := etcdtest.StartWith(t, etcdtest.Options{TLS: true})
	files := server.Files()
	good, err := TLSFiles(files.CA, files.Cert, files.Key)
	if err != nil {
		t.Fatal(err)
	}
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}, TLS: good})
	put(t, s, cart, row("10.0.0.1", "1"))
	v, _ := follow(t, s)
	v.has("shop/cart PROTOCOL_HTTP 10.0.0.1")
	bare, err := TLSFiles(files.CA, "", "")
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := TLSFiles("", files.Cert, files.Key)
	if err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]Config{"no certificate": {TLS: bare}, "no authority": {TLS: stranger}, "the system's authorities": {}} {
		cfg.Endpoints = []string{server.Endpoint()}
		if err := newStore(t, cfg).Put(t.Context(), cart, row("10.0.0.2", "1")); err == nil {
			t.Errorf("%s: a row was written", name)
		}
	}
	for _, bad := range [][3]string{{files.Key, "", ""}, {"/nowhere", "", ""}, {files.CA, files.Cert, ""}, {files.CA, files.Key, files.Cert}} {
		if _, err := TLSFiles(bad[0], bad[1], bad[2]); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

// What is configured and would be left out without a word is an error.
func TestNewRefuses(t *testing.T) {
	tlsConfig, err := TLSFiles("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]Config{
		"no endpoint":         {},
		"no URL":              {Endpoints: []string{"etcd:2379"}},
		"no host":             {Endpoints: []string{"https://"}},
		"TLS without TLS":     {Endpoints: []string{"http://etcd:2379"}, TLS: tlsConfig},
		"a region of two":     {Endpoints: []string{"http://etcd:2379"}, Region: "eu/west"},
		"half of credentials": {Endpoints: []string{"http://etcd:2379"}, User: "x"},

		"a password in the clear":        {Endpoints: []string{"http://etcd:2379"}, User: "x", Password: "y"},
		"one in the clear to one member": {Endpoints: []string{"https://a:2379", "http://10.0.0.1:2379"}, User: "x", Password: "y"},
		"a name like the loopback's":     {Endpoints: []string{"http://localhost.example:2379"}, User: "x", Password: "y"},
		"an address before the host":     {Endpoints: []string{"http://127.0.0.1@etcd:2379"}, User: "x", Password: "y"},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	for _, e := range []string{"https://etcd:2379", "http://127.0.0.1:2379", "http://[::1]:2379", "http://localhost:2379"} {
		if _, err := New(Config{Endpoints: []string{e}, User: "x", Password: "y"}); err != nil {
			t.Errorf("a password to %s: %v", e, err)
		}
	}
}

// Thousands of bad keys and values among good rows: each is left out, counted by its
// fault, and named once, in a log that does not grow without end.
func TestBadRows(t *testing.T) {
	server := etcdtest.Start(t)
	c := server.Client()
	var log bytes.Buffer
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}, Log: slog.New(slog.NewTextHandler(&log, nil))})
	value := func(e *registrypb.ServiceEndpoint) string {
		b, err := proto.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	const at = registry.Root + "local/clusters/local/ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/"
	unclassed, newer := row("10.9.0.1", "1"), row("10.9.0.7", "1")
	unclassed.Ports = append(unclassed.Ports, 99)
	newer.Ports, newer.PortProtocols[99] = append(newer.Ports, 99), 77 // which is no fault
	want := map[registry.Fault]uint64{}
	for _, b := range []struct {
		key, value string
		fault      registry.Fault
	}{
		{at + "10.9.0.1", value(unclassed), registry.Unclassed},
		{at + "10.9.0.2", "\xff\xff", registry.BadValue},
		{at + "10.9.0.3", value(row("10.9.0.4", "1")), registry.Misplaced},
		{at + "10.9.0.5", value(row("10.9.0.5", "1", tcp)), registry.Misplaced},
		{at + "10.9.0.6", "", registry.BadAddress},
		{at + "cart-1", value(row("10.9.0.6", "1")), registry.BadKey},
		{registry.Root + "x", "x", registry.BadKey},
		{at + "10.9.0.7", value(newer), registry.NoFault},
	} {
		raw(t, c, b.key, b.value)
		if b.fault != registry.NoFault {
			want[b.fault]++
		}
	}
	const many = 12_000 // more than a page
	ops := []clientv3.Op{}
	for i := range many {
		ops = append(ops, clientv3.OpPut(fmt.Sprintf("%snobody-%d", at, i), ""))
		if len(ops) == 100 {
			again(t, func(ctx context.Context) error { _, err := c.Txn(ctx).Then(ops...).Commit(); return err })
			ops = ops[:0]
		}
	}
	want[registry.BadKey] += many
	good := fill(t, s)
	put(t, s, model.ServiceName{Namespace: "shop", Name: "web"}, row("10.8.0.1", "1")) // behind all the bad ones
	good = append(good, "shop/cart PROTOCOL_HTTP 10.9.0.7", "shop/web PROTOCOL_HTTP 10.8.0.1")
	v, _ := follow(t, s)
	v.has(good...)
	for f, n := range s.Skipped {
		if n.Value() != want[f] {
			t.Errorf("%s: %d, want %d", f, n.Value(), want[f])
		}
	}

	// A row that goes bad serves nothing from then on; mended, it does again.
	raw(t, c, at+"10.0.0.1", "\xff\xff")
	v.has(good[1:]...)
	put(t, s, cart, row("10.0.0.1", "2"))
	v.has(good...)

	// Listed once more, nothing is named once more.
	v.until("well", func() bool { return v.told > 0 && v.err == nil })
	server.Kill()
	server.Restart()
	v.until("another list", func() bool { return v.wholes == 2 && v.err == nil })
	lines := log.String()
	if n := strings.Count(lines, "key="); n > maxNamed || n < maxNamed-1 {
		t.Errorf("%d named, the bound is %d", n, maxNamed)
	}
	if n := strings.Count(lines, "too many to name"); n != 1 {
		t.Errorf("that there are too many was said %d times", n)
	}
	if n := strings.Count(lines, at+"10.9.0.1 "); n != 1 {
		t.Errorf("one bad row was named %d times", n)
	}
}

// Pages that are larger than an answer may be are asked for in smaller ones, and hold
// together what stood there at one moment.
func TestPagesOfLargeRows(t *testing.T) {
	server := etcdtest.Start(t)
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	for i := range 60 {
		put(t, s, cart, row(fmt.Sprintf("10.0.0.%d", i+1), strings.Repeat("x", 200)))
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{server.Endpoint()}, MaxCallRecvMsgSize: 4096, MaxCallSendMsgSize: 4096, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var got []string
	if _, err := s.pages(t.Context(), c, registry.Root, func(k, _ []byte) {
		if len(got) == 0 { // what comes while it is read is not of it
			put(t, s, cart, row("9.0.0.9", "1"))
			remove(t, s, cart, "10.0.0.60")
		}
		got = append(got, strings.TrimPrefix(string(k), registry.Root))
	}); err != nil {
		t.Fatal(err)
	}
	var want []string
	for i := range 60 {
		want = append(want, fmt.Sprintf("local/clusters/local/ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/10.0.0.%d", i+1))
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%d keys: %q", len(got), got)
	}
}

// The convergence property: whatever is put, deleted, compacted and cut, what is
// followed ends as what the store has, and never held a row that was not written.
func TestConvergence(t *testing.T) {
	r := testseed.Rand(t)
	server := etcdtest.Start(t)
	gate := etcdtest.NewGate(t, server.Addr())
	near := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	c := server.Client()
	// What many removals during an interruption look like is no different from a store
	// that has lost rows: they are believed after the grace.
	s := newStore(t, Config{Endpoints: []string{"http://" + gate.Addr()}, Grace: 100 * time.Millisecond})
	s.pause = func(int) time.Duration { return 20 * time.Millisecond }

	// Rows are noted before they are written: whatever is seen must be among them.
	var mu sync.Mutex
	written := map[string]bool{}
	v := &view{t: t, changed: make(chan struct{}), rows: map[string]string{}}
	v.seen = func(key, text string) {
		mu.Lock()
		defer mu.Unlock()
		if !written[key+" "+text] {
			t.Errorf("%s: %s was never written", key, text)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var watch sync.WaitGroup
	watch.Go(func() { _ = s.Watch(ctx, v.on, v.report) })
	defer watch.Wait()
	defer cancel()

	steps := testseed.Count(1000, 4000)
	breaks, open := 0, true
	reopen := func() {
		if err := gate.Open(); err != nil {
			t.Fatal(err)
		}
		open = true
	}
	for i := range steps {
		n := model.ServiceName{Namespace: "shop", Name: []string{"cart", "web", "db"}[r.IntN(3)]}
		ip := fmt.Sprintf("10.0.0.%d", 1+r.IntN(25))
		switch d := r.IntN(400); {
		case d < 230:
			var classes []registrypb.PortProtocol
			for _, c := range []registrypb.PortProtocol{http, tcp, udp} {
				if r.IntN(2) == 0 {
					classes = append(classes, c)
				}
			}
			e := row(ip, fmt.Sprint(i), classes...)
			e.Health = registrypb.ServiceEndpoint_Health(r.IntN(4))
			mu.Lock()
			for _, p := range registry.Protocols(e) {
				written[key(registry.Row{Region: "local", Cluster: "local", Service: n, Protocol: p, IP: ip})+" "+text(e)] = true
			}
			mu.Unlock()
			put(t, near, n, e)
		case d < 350:
			remove(t, near, n, ip)
		case d < 360:
			compact(t, c)
		case d < 370:
			gate.Cut()
			breaks++
		case d < 375 && open:
			gate.Shut()
			open = false
			breaks++
		case d == 375 && r.IntN(2) == 0:
			server.Kill()
			server.Restart()
			breaks++
		case d < 390 && !open:
			reopen()
		case d >= 395: // some interruptions are over, and what follows is heard as it happens
			reopen()
			v.until("well", func() bool { return v.told > 0 && v.err == nil })
		}
	}
	if err := gate.Open(); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	again(t, func(ctx context.Context) error {
		got, err := c.Get(ctx, registry.Root, clientv3.WithPrefix())
		if err != nil {
			return err
		}
		for _, kv := range got.Kvs {
			k, err := registry.ParseKey(kv.Key)
			if err != nil {
				t.Fatal(err)
			}
			e := &registrypb.ServiceEndpoint{}
			if err := proto.Unmarshal(kv.Value, e); err != nil {
				t.Fatal(err)
			}
			want[key(registry.Row{Region: k.Region, Cluster: k.Cluster, Service: k.Service, Protocol: k.Protocol, IP: k.IP})] = text(e)
		}
		return nil
	})
	v.until("the same rows as the store", func() bool { return maps.Equal(v.rows, want) && v.err == nil })
	v.check(func() {
		counts.Say(t, "%d changes, %d interruptions, %d lists of which %d whole; ended with %d rows, as the store", steps, breaks, s.Lists.Value(), v.wholes, len(want))
	})
}
