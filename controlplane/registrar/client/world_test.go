package client_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/controlplane/input"
	"aether/controlplane/registrar/client"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// heard is a Sink: what a loop would know, and all that it was told.
type heard struct {
	mu       sync.Mutex
	replaces int
	rows     map[model.ServiceName][]string // as they look
	catalog  map[model.ServiceName]bool
	problems map[string]model.Problem
	states   []input.Status
	given    map[model.ServiceName][]model.Endpoint    // as they were handed over
	look     func(rows map[model.ServiceName][]string) // at each state; under mu
}

func newHeard() *heard {
	return &heard{given: map[model.ServiceName][]model.Endpoint{}, rows: map[model.ServiceName][]string{}, catalog: map[model.ServiceName]bool{}, problems: map[string]model.Problem{}}
}

func (h *heard) Replace(b input.Batch) {
	h.mu.Lock()
	clear(h.rows)
	clear(h.given)
	clear(h.catalog)
	clear(h.problems)
	h.replaces++
	h.mu.Unlock()
	h.Apply(b)
}

func (h *heard) Apply(b input.Batch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for n, rows := range h.given { // what was handed over does not change
		var l []string
		for i := range rows {
			l = append(l, looks(&rows[i]))
		}
		if slices.Sort(l); !slices.Equal(l, h.rows[n]) {
			panic(fmt.Sprintf("rows of %s were %v and are %v", n, h.rows[n], l))
		}
	}
	for n, rows := range b.Endpoints {
		delete(h.rows, n)
		h.given[n] = rows
		for i := range rows {
			if rows[i].Service != n {
				panic(fmt.Sprintf("a row of %s under %s", rows[i].Service, n))
			}
			h.rows[n] = append(h.rows[n], looks(&rows[i]))
		}
		slices.Sort(h.rows[n])
	}
	for n, in := range b.Catalog {
		if len(in) > 0 {
			h.catalog[n] = true
		} else {
			delete(h.catalog, n)
		}
	}
	for k, p := range b.Problems {
		delete(h.problems, k)
		if len(p) > 0 {
			h.problems[k] = p[0]
		}
	}
	if h.look != nil {
		h.look(h.rows)
	}
}

func (h *heard) Report(s input.Status) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.states = append(h.states, s)
}

func (h *heard) status() input.Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.states) == 0 {
		return input.Status{}
	}
	return h.states[len(h.states)-1]
}

func (h *heard) of(n model.ServiceName) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.rows[n])
}

// cold reports whether the name is in the catalog, without rows here.
func (h *heard) cold(n model.ServiceName) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.catalog[n]
}

// looks is an endpoint as a line.
func looks(e *model.Endpoint) string {
	var ports []string
	for _, p := range e.Ports {
		ports = append(ports, fmt.Sprintf("%d=%d", p.Number, p.Class))
	}
	return fmt.Sprintf("%s %s %s/%s node=%s cluster=%s at=%s/%s port=%d ports=%v weight=%d health=%d id=%s meta=%v",
		e.Service, e.IP, e.Service.Namespace, e.Pod, e.Node, e.Cluster, e.Region, e.Zone, e.DefaultPort, ports, e.Weight, e.Health, e.SPIFFEID, e.Metadata)
}

// shown is the same line of a row as contract 9.2 has it.
func shown(service string, e *row) string {
	ns, sa, _ := strings.Cut(service, "/")
	var ports []string
	for _, p := range slices.Sorted(slices.Values(e.Ports)) {
		ports = append(ports, fmt.Sprintf("%d=%d", p, e.PortProtocols[p]))
	}
	return fmt.Sprintf("%s %s %s/%s node=%s cluster=%s at=%s/%s port=%d ports=%v weight=%d health=%d id=%s meta=%v",
		service, netip.MustParseAddr(e.Ip), ns, e.KubernetesMetadata.PodName, e.KubernetesMetadata.NodeName, e.ClusterName, e.Locality.Region, e.Locality.Zone,
		e.Port, ports, e.Weight, e.Health, cmp.Or(e.SpiffeId, "spiffe://td/ns/"+ns+"/sa/"+sa), e.Metadata)
}

// pod is a row that is valid: of HTTP at 8080, and of raw TCP at 9000 with tcp.
func pod(ip string, health registrypb.ServiceEndpoint_Health, tcp bool) *row {
	e := &row{
		Ip: ip, ClusterName: "c1", Port: 8080, Weight: 1024, Health: health, Ports: []uint32{8080},
		PortProtocols:      map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP},
		Locality:           &registrypb.ServiceEndpoint_Locality{Region: "r1", Zone: "z1"},
		KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{Namespace: "shop", PodName: "pod-" + ip, NodeName: "n1", NodeIp: "192.0.2.1"},
		Metadata:           map[string]string{"version": "v1"},
	}
	if tcp {
		e.Ports = append(e.Ports, 9000)
		e.PortProtocols[9000] = registrypb.PortProtocol_PORT_PROTOCOL_TCP
	}
	return e
}

func classesOf(e *row) []registrypb.Service_Protocol {
	if len(e.Ports) > 1 {
		return []registrypb.Service_Protocol{registrypb.Service_PROTOCOL_HTTP, registrypb.Service_PROTOCOL_TCP}
	}
	return []registrypb.Service_Protocol{registrypb.Service_PROTOCOL_HTTP}
}

// add writes a row under each class that it serves (contract 9.4).
func (f *fleet) add(service string, e *row) {
	for _, p := range classesOf(e) {
		f.put(place{service, p, e.Ip}, e)
	}
}

// state is what a node should know of the services that it wants; the rest is cold.
func (f *fleet) state(wants func(string) bool) (rows map[model.ServiceName][]string, cold map[model.ServiceName]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	rows, cold = map[model.ServiceName][]string{}, map[model.ServiceName]bool{}
	for p, e := range f.rows {
		n := name(p.service)
		if !wants(p.service) {
			cold[n] = true
			continue
		}
		if faulty(e) {
			continue
		}
		if l := shown(p.service, e); !slices.Contains(rows[n], l) {
			rows[n] = append(rows[n], l)
		}
	}
	for _, l := range rows {
		slices.Sort(l)
	}
	return rows, cold
}

func faulty(e *row) bool { return len(e.PortProtocols) != len(e.Ports) }

func name(key string) model.ServiceName {
	ns, n, _ := strings.Cut(key, "/")
	return model.ServiceName{Namespace: ns, Name: n}
}

// node is a client under test, which runs.
type node struct {
	*client.Client
	heard *heard
	end   func()
}

func startNode(t testing.TB, cfg client.Config) *node {
	t.Helper()
	n := &node{heard: newHeard()}
	cfg.Cluster, cfg.Node, cfg.TrustDomain = "c1", "n1", "td"
	if h, ok := cfg.Sink.(*heard); ok {
		n.heard = h
	}
	cfg.Sink = n.heard
	var err error
	if n.Client, err = client.New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := n.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	n.end = func() {
		stop()
		<-done
	}
	return n
}

// pass lets d go by on the test's clock.
func pass(d time.Duration) { <-time.After(d) }

// agrees checks that the node knows what the registry has in its scope.
func (n *node) agrees(t *testing.T, f *fleet, wants func(string) bool) {
	t.Helper()
	rows, cold := f.state(wants)
	n.heard.mu.Lock()
	defer n.heard.mu.Unlock()
	have := maps.Clone(n.heard.rows)
	maps.DeleteFunc(have, func(_ model.ServiceName, l []string) bool { return len(l) == 0 })
	for n := range rows {
		if !slices.Equal(have[n], rows[n]) {
			t.Fatalf("of %s the node has\n%v\nthe registry has\n%v", n, have[n], rows[n])
		}
		delete(have, n)
	}
	if len(have) > 0 {
		t.Fatalf("the node has %v, which the registry has not, or nobody wants", have)
	}
	if !maps.Equal(n.heard.catalog, cold) {
		t.Fatalf("names without rows: the node has\n%v\nthe registry has\n%v", n.heard.catalog, cold)
	}
}

func everything(string) bool { return true }
