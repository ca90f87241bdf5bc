package peer

import (
	"bytes"
	"context"
	"embed"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"

	"aether/e2e/rig"
)

//go:embed testdata/*.yaml
var configs embed.FS

// envoy is a running Envoy.
type envoy struct {
	*rig.Proc
	w     *world
	node  *rig.Node
	admin int // port
}

// destination is a pod that Envoy receives hops for.
type destination struct {
	Pod   *rig.Pod
	Cert  string // directory of the certificate it shows
	Only  string // the one caller it takes; empty: any of the trust domain
	Ports []destinationPort
}

// destinationPort: App is "h1", "h2" or "tcp".
type destinationPort struct {
	Port int
	App  string
}

// bPorts are those of app.
var bPorts = []destinationPort{{8080, "h1"}, {8081, "h2"}, {9000, "tcp"}}

// hop is a way that an Envoy source goes, reached as Host <Name>.test on any port, or, as raw
// TCP, by dialling the port Dial of the service.
type hop struct {
	Name  string
	Codec string // "h2", "h1" or "tcp"
	To    netip.Addr
	Dial  int
	SNI   string
	ALPN  string
	TLS   string // empty: 1.3
	Pin   string // the peer's SPIFFE ID
	Cert  string // directory of its own certificate
}

// start starts Envoy on the node and waits until it serves.
func (w *world) envoy(node, adminPort int, config string, data map[string]any, args ...string) *envoy {
	w.Helper()
	bin, err := rig.Envoy(w.ctx)
	must(w, err)
	tmpl, err := template.ParseFS(configs, "testdata/"+config)
	must(w, err)
	var b bytes.Buffer
	data["Admin"] = adminPort
	must(w, tmpl.Option("missingkey=error").Execute(&b, data))
	n := w.rig.Nodes[node]
	name := fmt.Sprintf("envoy-%s-%d", n.Name, adminPort)
	path := filepath.Join(w.rig.Dir, name+".yaml")
	must(w, os.WriteFile(path, b.Bytes(), 0o644))
	e := &envoy{w: w, node: n, admin: adminPort}
	e.Proc, err = w.rig.StartProcess(&n.Space, name, append([]string{bin, "-c", path, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warn"}, args...)...)
	must(w, err)
	w.Cleanup(func() {
		if err := e.Stop(); err != nil {
			w.Error(err)
		}
		if w.Failed() {
			w.Logf("%s: its log ends\n%s", e.Name, e.Tail(2000))
		}
	})
	must(w, e.Ready(w.ctx, func(ctx context.Context) error {
		_, err := admin(ctx, n, adminPort, "GET", "/ready")
		return err
	}))
	return e
}

// destinations starts Envoy for pods of the node.
func (w *world) destinations(node, adminPort int, pods []destination, args ...string) *envoy {
	w.Helper()
	return w.envoy(node, adminPort, "destination.yaml", map[string]any{"Pods": pods}, args...)
}

// source starts Envoy for pod a, and captures the pod's traffic for it.
func (w *world) source(hops []hop) *envoy {
	w.Helper()
	for i := range hops {
		if hops[i].TLS == "" {
			hops[i].TLS = "TLSv1_3"
		}
	}
	must(w, w.a.Capture(w.ctx))
	return w.envoy(0, 9901, "source.yaml", map[string]any{
		"Pod": w.a, "Service": service.String(), "Hops": hops, "Bundle": filepath.Join(w.svid("a"), rig.BundleFile),
	})
}

// stat is the value of a counter or gauge.
func (e *envoy) stat(name string) int {
	e.w.Helper()
	b, err := admin(e.w.ctx, e.node, e.admin, "GET", "/stats?filter=^"+strings.ReplaceAll(name, ".", `\.`)+"$")
	must(e.w, err)
	key, value, ok := strings.Cut(strings.TrimSpace(string(b)), ": ")
	if !ok || key != name {
		e.w.Fatalf("%s has no statistic %s: %q", e.Name, name, b)
	}
	n, err := strconv.Atoi(value)
	must(e.w, err)
	return n
}
