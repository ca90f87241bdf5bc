package bench

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"text/template"
	"time"

	"aether/e2e/rig"
)

// work is what a pair of proxies is started for; only HAProxy needs to be told.
type work string

const (
	workHTTP work = "http"
	workTCP  work = "tcp"
)

// pair is the proxies of the source and of the destination; both nil with no proxy.
type pair struct{ a, b *rig.Proc }

// variant is one column of the comparison.
type variant struct {
	name string
	// prepare is called once, before anything is started; nil: nothing to do.
	prepare func(ctx context.Context, s *site, root string) error
	// start starts both proxies; nil: there are none. It need not wait until they serve.
	start func(ctx context.Context, s *site, w work) (pair, error)
}

var known = []variant{
	{name: "direct"},
	{name: "ours", prepare: prepareOurs, start: startOurs},
	{name: "envoy", prepare: prepareEnvoy, start: startEnvoy},
	{name: "haproxy", prepare: prepareHAProxy, start: startHAProxy},
	{name: "floor", prepare: prepareFloor, start: startFloor},
	{name: "adapt", prepare: prepareOurs, start: startAdapt},
	{name: "two", prepare: prepareOurs, start: startTwo},
	{name: "big", prepare: prepareBig, start: startOurs},
}

// readyTimeout bounds the start of a pair, and then the wait for the first answer through it.
const readyTimeout = 20 * time.Second

// with starts the site's proxies, waits until the whole path answers, calls f, and stops them.
func (s *site) with(ctx context.Context, w work, f func(pair) (sample, error)) (_ sample, err error) {
	var p pair
	if s.start != nil {
		if p, err = s.start(ctx, s, w); err != nil {
			return nil, err
		}
		defer func() {
			for _, proc := range []*rig.Proc{p.a, p.b} {
				// A proxy that crashed explains whatever else went wrong.
				if e := proc.Stop(); e != nil {
					err = errors.Join(e, err)
				}
			}
		}()
	}
	wait, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	client := s.A.HTTPClient()
	defer client.CloseIdleConnections()
	answers := func(ctx context.Context) error {
		if w == workTCP {
			return s.load(ctx, nil, "download", "-addr", s.target(9000).String(), "-bytes", "1000")
		}
		return rig.Get200(ctx, client, "http://"+s.target(8080).String()+"/", serviceHost)
	}
	if p.a == nil {
		err = rig.Until(wait, answers)
	} else if err = p.a.Ready(wait, answers); err != nil {
		err = fmt.Errorf("%w\nand that of %s:\n%s", err, p.b.Name, p.b.Tail(1000))
	}
	if err != nil {
		return nil, err
	}
	return f(p)
}

// startPair starts B, then A, so that A finds it. ready, if not nil, is asked of each,
// and must answer within readyTimeout.
func (s *site) startPair(ctx context.Context, name string, command func(side string) []string, ready func(node *rig.Node) func(context.Context) error) (pair, error) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	var procs []*rig.Proc
	for _, side := range []struct {
		name string
		node *rig.Node
	}{{"b", s.rig.Nodes[1]}, {"a", s.rig.Nodes[0]}} {
		p, err := s.rig.StartProcess(&side.node.Space, name+"-"+side.name, command(side.name)...)
		if err == nil {
			procs = append(procs, p)
			if ready != nil {
				err = p.Ready(ctx, ready(side.node))
			}
		}
		if err != nil {
			for _, p := range procs {
				p.Stop() // the first error says more
			}
			return pair{}, err
		}
	}
	return pair{a: procs[1], b: procs[0]}, nil
}

// adminReady asks an admin port's /ready; Envoy and ours have the same.
func adminReady(node *rig.Node) func(context.Context) error {
	return func(ctx context.Context) error {
		c := node.HTTPClient()
		defer c.CloseIdleConnections()
		return rig.Get200(ctx, c, "http://127.0.0.1:9901/ready", "")
	}
}

// Ours: built from this tree; it captures by itself.

func prepareOurs(ctx context.Context, s *site, root string) error {
	if err := build(ctx, root, filepath.Join(s.suite.tools, "aether-proxy"), "./cmd/aether-proxy"); err != nil {
		return err
	}
	// All outbound TCP is captured, as it is for the peers (contract 1.5).
	all := map[string]string{"capture.aether.io/redirect-all": "true"}
	doc := rig.PodYAML(s.A, rig.PodManifest{Ports: "8080", Annotations: all}) +
		rig.PodYAML(s.C, rig.PodManifest{Ports: "8080", Annotations: all}) +
		rig.PodYAML(s.B, rig.PodManifest{Ports: "8080,9000=tcp", Annotations: all}) +
		rig.ServiceYAML(rig.ServiceManifest{Name: "b", ClusterIPs: []netip.Addr{netip.MustParseAddr(serviceIP)}, Ports: []uint16{8080, 9000}})
	return os.WriteFile(filepath.Join(s.conf, "mesh.yaml"), []byte(doc), 0o644)
}

func startOurs(ctx context.Context, s *site, _ work) (pair, error) { return s.proxies(ctx, "safe") }

// Adapt: ours, with loops that keep their processor while they wait (decision 028).
func startAdapt(ctx context.Context, s *site, _ work) (pair, error) { return s.proxies(ctx, "adapt") }

// Two: ours with two loops from the start.
func startTwo(ctx context.Context, s *site, _ work) (pair, error) {
	return s.proxies(ctx, "safe", "--min-loops", "2")
}

func (s *site) proxies(ctx context.Context, blocking string, more ...string) (pair, error) {
	return s.startPair(ctx, "aether-proxy", func(side string) []string {
		node := map[string]string{"a": "node1", "b": "node2"}[side]
		return append([]string{
			filepath.Join(s.suite.tools, "aether-proxy"), "--config", s.conf, "--node", node, "--certs", s.Certs,
			"--trust-domain", trustDomain, "--admin", "127.0.0.1:9901", "--capture", "--blocking", blocking, "--drain-time", "0s",
		}, more...)
	}, adminReady)
}

// Big: ours among 2,000 services of three ports and three endpoints each, with rules and policy in force on the way.

const (
	bigServices = 2000
	bigPolicy   = `---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {namespace: demo, name: b}
spec:
  parentRefs: [{group: "", kind: Service, name: b, port: 8080}]
  rules:
  - matches: [{path: {type: PathPrefix, value: /admin}, headers: [{name: x-admin, value: "1"}]}]
    backendRefs: [{name: b, port: 8080}]
  - matches: [{path: {type: PathPrefix, value: /v2}}, {headers: [{name: x-version, value: "2"}]}]
    backendRefs: [{name: b, port: 8080}]
  - matches: [{path: {type: PathPrefix, value: /}}]
    filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-rule, value: any}]}}]
    backendRefs: [{name: b, port: 8080}]
---
apiVersion: config.aether.io/v1
kind: HTTPFilter
metadata: {namespace: demo, name: b}
spec:
  scope: SCOPE_INBOUND
  targetRefs: [{kind: Service, name: b}]
  rbac:
    action: ALLOW
    policies:
    - {name: a, principals: [{spiffeId: "spiffe://rig.test/ns/demo/sa/a"}], permissions: [{method: GET}]}
`
)

func prepareBig(ctx context.Context, s *site, root string) error {
	if err := prepareOurs(ctx, s, root); err != nil {
		return err
	}
	var b strings.Builder
	far := &rig.Node{Space: rig.Space{Name: "elsewhere"}, IP4: netip.MustParseAddr("10.1.9.1")}
	addr := netip.MustParseAddr("10.100.0.1")
	pod := netip.MustParseAddr("10.200.0.1")
	for i := range bigServices {
		name := fmt.Sprintf("svc%04d", i)
		b.WriteString(rig.ServiceYAML(rig.ServiceManifest{Name: name, ClusterIPs: []netip.Addr{addr}, Ports: []uint16{8080, 8081, 9000}}))
		addr = addr.Next()
		for j := range 3 {
			p := &rig.Pod{Space: rig.Space{Name: fmt.Sprintf("%s-%d", name, j), NetNS: "/run/netns/none"}, Node: far, IP4: pod}
			b.WriteString(rig.PodYAML(p, rig.PodManifest{Account: name, Ports: "8080,8081,9000=tcp"}))
			pod = pod.Next()
		}
	}
	b.WriteString(bigPolicy)
	return os.WriteFile(filepath.Join(s.conf, "big.yaml"), []byte(b.String()), 0o644)
}

// Envoy, one worker: capture, sniffing, routing by host, mTLS hop with SNI, delivery in the
// pod's namespace, as Aether configured it.

func prepareEnvoy(ctx context.Context, s *site, _ string) error {
	bin, err := rig.Envoy(ctx)
	if err != nil {
		return fmt.Errorf("%w; or leave envoy out of -variants", err)
	}
	if err := os.Symlink(bin, filepath.Join(s.suite.tools, "envoy")); err != nil {
		return err
	}
	if err := s.render("envoy-a.yaml", "envoy-b.yaml"); err != nil {
		return err
	}
	return s.A.Capture(ctx)
}

func startEnvoy(ctx context.Context, s *site, _ work) (pair, error) {
	return s.startPair(ctx, "envoy", func(side string) []string {
		return []string{
			filepath.Join(s.suite.tools, "envoy"), "-c", filepath.Join(s.conf, "envoy-"+side+".yaml"),
			"--concurrency", "1", "--disable-hot-restart", "--log-level", "warn",
		}
	}, adminReady)
}

// HAProxy, one thread: mode http with HTTP/2 over the mTLS hop, or mode tcp.

func prepareHAProxy(ctx context.Context, s *site, _ string) error {
	if err := rig.Need("haproxy"); err != nil {
		return err
	}
	if err := s.render("haproxy-http-a.cfg", "haproxy-http-b.cfg", "haproxy-tcp-a.cfg", "haproxy-tcp-b.cfg"); err != nil {
		return err
	}
	return s.A.Capture(ctx)
}

func startHAProxy(ctx context.Context, s *site, w work) (pair, error) {
	return s.startPair(ctx, "haproxy", func(side string) []string {
		return []string{"haproxy", "-db", "-f", filepath.Join(s.conf, fmt.Sprintf("haproxy-%s-%s.cfg", w, side))}
	}, nil)
}

// The floor: captured alike, two relays that do nothing but move the bytes. They run in the
// pods' namespaces and have a connection of their own for each of the client's.

const floorPort = "18009"

func prepareFloor(ctx context.Context, s *site, _ string) error { return s.A.Capture(ctx) }

func startFloor(_ context.Context, s *site, _ work) (p pair, err error) {
	load := filepath.Join(s.suite.tools, "load")
	p.b, err = s.rig.StartProcess(&s.B.Space, "floor-b", load, "relay", "-addr", "0.0.0.0:"+floorPort, "-dial", "127.0.0.1:8080")
	if err != nil {
		return pair{}, err
	}
	p.a, err = s.rig.StartProcess(&s.A.Space, "floor-a", load, "relay", "-addr", "0.0.0.0:18001", "-dial", s.B.IP4.String()+":"+floorPort)
	if err != nil {
		p.b.Stop() // the first error says more
		return pair{}, err
	}
	return p, nil
}

//go:embed peers
var peers embed.FS

// render fills in peers' configurations: pods, addresses and certificates of the site.
func (s *site) render(names ...string) error {
	for _, name := range names {
		t, err := template.ParseFS(peers, "peers/"+name)
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		var b bytes.Buffer
		if err := t.Option("missingkey=error").Execute(&b, s); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		if err := os.WriteFile(filepath.Join(s.conf, name), b.Bytes(), 0o644); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	return nil
}
