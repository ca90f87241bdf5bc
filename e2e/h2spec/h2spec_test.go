// Package h2spec runs the conformance suite of that name, strict and whole,
// against the listeners of the proxy that speak HTTP/2: h2c of captured pods,
// the proxy port, and the mesh port behind mTLS.
//
//   - The suite is built from the module in testdata/tool, which pins it and what
//     it needs, so that none of it is in the proxy's own go.mod.
//   - The suite sees the whole way: what is forwarded is answered by net/http.
//   - A case may fail only if it stands in exempt with its reason, and what
//     stands there must fail.
//
// It knows the proxy only from outside.
package h2spec

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/e2e/counts"
	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// exempt are the cases that may fail, each with its reason. They must fail: a
// line whose case passes is an error, and so is one that the suite does not hold.
var exempt = []struct {
	listener string // empty: all
	name     string // section of the suite and description
	why      string
}{
	{"", "http2/5.3.1 Sends HEADERS frame that depend on itself",
		"RFC 9113 5.3.2 deprecates priorities: what they say is not looked at"},
	{"", "http2/5.3.1 Sends PRIORITY frame that depend on itself",
		"RFC 9113 5.3.2 deprecates priorities: what they say is not looked at"},
	{"h2c captured", "http2/3.5 Sends invalid connection preface",
		"bytes that are no HTTP go where they were dialled to, where nobody is: the reset that follows ends the connection, but the suite knows only an orderly end"},
	{"proxy port", "http2/3.5 Sends invalid connection preface",
		"bytes that do not begin with the preface are taken for HTTP/1 there, and answered in it: RFC 9113 3.4 is about connections that are HTTP/2"},
}

// fewest is less than what the suite holds by a margin: a run of fewer cases was none.
const fewest = 140

const (
	appName = "app.shop.aether.internal"
	vip     = 30
	port    = 8081 // h2c to the application
)

// patience bounds each run of the suite, whose cases wait for up to two seconds each where
// nothing is to come.
const patience = 4 * time.Minute

// report is the suite's JUnit file.
type report struct {
	Suites []struct {
		ID    string `xml:"package,attr"`
		Cases []struct {
			Name    string  `xml:"classname,attr"`
			Failure *string `xml:"failure"`
			Error   *string `xml:"error"`
			Skipped *string `xml:"skipped"`
		} `xml:"testcase"`
	} `xml:"testsuite"`
}

func TestConformance(t *testing.T) {
	dir := t.TempDir()
	suite, proxy := filepath.Join(dir, "h2spec"), filepath.Join(dir, "aether-proxy")
	build(t, "testdata/tool", suite, "github.com/summerwind/h2spec/cmd/h2spec")
	build(t, ".", proxy, "aether/cmd/aether-proxy")

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m, err := mesh.New(ctx, mesh.Options{Proxy: proxy})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for i := range m.Rig.Nodes {
				if p := m.Proxy(i); p != nil {
					t.Logf("log of the proxy of node%d ends:\n%s", i+1, p.Tail(4000))
				}
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	web, err := m.AddPod(ctx, mesh.Pod{Name: "web"})
	must(t, err)
	app, err := m.AddPod(ctx, mesh.Pod{Name: "app", Node: 1, Ports: fmt.Sprintf("%d=h2", port)})
	must(t, err)
	out, err := m.Rig.AddPod(ctx, 0, "out") // no pod of the mesh: nothing of its traffic is captured
	must(t, err)
	must(t, m.Service(rig.ServiceManifest{Name: "app", ClusterIPs: m.ClusterIPs(vip), Ports: []uint16{port}}))
	must(t, m.ServeHTTP(ctx, &app.Space, fmt.Sprintf("127.0.0.1:%d", port), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/plain")
		io.WriteString(w, "an answer that is longer than the windows of the suite\n")
	})))
	must(t, m.Start(ctx))

	// The suite asks for the name and port that it dials: names lead to the listeners, and
	// where the port is another one a front stands before it.
	named := func(pod *rig.Pod, addr string) func(ctx context.Context, suite ...string) *exec.Cmd {
		hosts := filepath.Join(dir, "hosts-"+addr)
		must(t, os.WriteFile(hosts, fmt.Appendf(nil, "127.0.0.1 localhost\n%s %s\n", addr, appName), 0o644))
		return func(ctx context.Context, run ...string) *exec.Cmd {
			const mount = `mount --bind "$0" /etc/hosts && exec "$@"` // in ip(8)'s own mount namespace
			run = append(run, "-h", appName, "-p", strconv.Itoa(port))
			return pod.Command(ctx, append([]string{"sh", "-c", mount, hosts}, run...)...)
		}
	}
	svid, err := m.SVID("shop", "suite")
	must(t, err)
	hop, err := hopTo(out, netip.AddrPortFrom(app.IP4, 18008).String(), svid)
	must(t, err)
	at := fmt.Sprintf("127.0.0.1:%d", port)
	fronts := []*front{
		newFront(t, ctx, &out.Space, at, hop),
		newFront(t, ctx, &web.Space, at, func(ctx context.Context) (net.Conn, error) { return web.Dial(ctx, "tcp", "127.0.0.1:18081") }),
	}

	t.Run("listeners", func(t *testing.T) {
		for _, tt := range []struct {
			name    string
			command func(ctx context.Context, suite ...string) *exec.Cmd
		}{
			{"h2c captured", named(web, m.ClusterIPs(vip)[0].String())},
			{"proxy port", named(web, "127.0.0.1")},
			{"mesh port", named(out, "127.0.0.1")},
		} {
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				file := filepath.Join(dir, strings.ReplaceAll(tt.name, " ", "-")+".xml")
				out, err := tt.command(ctx, suite, "--strict", "--junit-report", file).CombinedOutput()
				// The exit status says that a case failed, which the report says better.
				if exit := new(exec.ExitError); err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
					t.Fatalf("h2spec: %v\n%s", err, tail(out))
				}
				judge(t, tt.name, file, out)
			})
		}
	})
	for _, f := range fronts {
		if err := f.failed(); err != nil {
			t.Errorf("a front could not reach its listener: %v", err)
		}
	}
}

// judge compares a listener's run with what may fail.
func judge(t *testing.T, listener, file string, out []byte) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; h2spec said:\n%s", err, tail(out))
	}
	var r report
	if err := xml.Unmarshal(b, &r); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	may := map[string]bool{} // false: not seen yet
	for _, e := range exempt {
		if e.listener == "" || e.listener == listener {
			may[e.name] = false
		}
	}
	ran := 0
	for _, s := range r.Suites {
		for _, c := range s.Cases {
			ran++
			name := s.ID + " " + c.Name
			_, excused := may[name]
			fault := c.Failure
			if fault == nil {
				fault = c.Error
			}
			switch {
			case c.Skipped != nil:
				t.Errorf("%s: skipped by the suite: the listener does not offer what it needs", name)
			case fault != nil && !excused:
				t.Errorf("%s: %s", name, strings.TrimSpace(*fault))
			case fault == nil && excused:
				t.Errorf("%s: passes; take it out of exempt", name)
			}
			if excused {
				may[name] = true
			}
		}
	}
	for name, seen := range may {
		if !seen {
			t.Errorf("exempt names %q, which the suite does not hold", name)
		}
	}
	if ran < fewest {
		t.Errorf("%d cases ran, the suite holds at least %d; it said:\n%s", ran, fewest, tail(out))
	}
	counts.Say(t, "h2spec: %d cases, %d of them exempt", ran, len(may))
}

// front leads connections of an address to a listener that the suite cannot ask by
// itself: bytes are carried as they are.
type front struct {
	ln  net.Listener
	to  func(ctx context.Context) (net.Conn, error)
	all sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]bool // guarded by mu; nil once closed
	err   error             // guarded by mu
}

// newFront serves until the test ends.
func newFront(t *testing.T, ctx context.Context, in *rig.Space, addr string, to func(ctx context.Context) (net.Conn, error)) *front {
	t.Helper()
	ln, err := in.Listen(ctx, "tcp", addr)
	must(t, err)
	f := &front{ln: ln, to: to, conns: map[net.Conn]bool{}}
	f.all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			f.all.Go(func() { f.relay(c) })
		}
	})
	t.Cleanup(f.close)
	return f
}

// hopTo makes hops to a mesh port: TLS with a certificate, the port as SNI.
func hopTo(from *rig.Pod, addr string, svid *rig.SVID) (func(context.Context) (net.Conn, error), error) {
	cert, err := svid.TLS()
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(svid.Bundle) {
		return nil, errors.New("the bundle holds no certificate")
	}
	cfg := &tls.Config{
		Certificates: []tls.Certificate{cert}, ServerName: strconv.Itoa(port), NextProtos: []string{"h2"},
		InsecureSkipVerify: true, // a SPIFFE certificate holds no name: its chain is verified here
		VerifyConnection: func(cs tls.ConnectionState) error {
			_, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
			return err
		},
	}
	return func(ctx context.Context) (net.Conn, error) {
		raw, err := from.Dial(ctx, "tcp", addr)
		if err != nil {
			return nil, err
		}
		c := tls.Client(raw, cfg)
		if err = c.HandshakeContext(ctx); err == nil && c.ConnectionState().NegotiatedProtocol != "h2" {
			err = fmt.Errorf("the mesh port negotiated %q, want h2", c.ConnectionState().NegotiatedProtocol)
		}
		if err != nil {
			raw.Close()
			return nil, err
		}
		return c, nil
	}, nil
}

// relay joins c to the listener until either ends.
func (f *front) relay(c net.Conn) {
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	to, err := f.to(ctx)
	if err != nil {
		f.note(err)
		return
	}
	defer to.Close()
	if !f.keep(c, to) {
		return
	}
	defer f.drop(c, to)
	up := make(chan struct{})
	go func() {
		defer close(up)
		_, _ = io.Copy(to, c)
		to.Close()
	}()
	_, _ = io.Copy(c, to)
	c.Close()
	<-up
}

func (f *front) note(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

func (f *front) failed() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// keep has close end the connections; false: it has been called already.
func (f *front) keep(all ...net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range all {
		if f.conns != nil {
			f.conns[c] = true
		}
	}
	return f.conns != nil
}

func (f *front) drop(all ...net.Conn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range all {
		delete(f.conns, c)
	}
}

func (f *front) close() {
	f.ln.Close()
	f.mu.Lock()
	for c := range f.conns {
		c.Close()
	}
	f.conns = nil
	f.mu.Unlock()
	f.all.Wait()
}

// build makes a binary of a package of the module in dir. Without it there is no test.
func build(t *testing.T, dir, binary, pkg string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-o", binary, pkg)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=readonly", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s in %s: %v\n%s", pkg, dir, err, out)
	}
}

func tail(b []byte) []byte { return bytes.TrimSpace(b[max(0, len(b)-4000):]) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
