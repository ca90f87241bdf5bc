package client_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"aether/controlplane/registrar/client"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

// wire is a replica of a fleet behind gRPC.
type wire struct {
	registrypb.UnimplementedRegistrarServiceServer
	r *replica
	// dieAfter, if not 0, is how many messages are sent before the process is gone, as by kill -9.
	dieAfter int
	die      func()
}

func (w *wire) WatchEndpoints(q *request, to grpc.ServerStreamingServer[event]) error {
	s, err := link{r: w.r}.WatchEndpoints(to.Context(), q)
	if err != nil {
		return err
	}
	for n := 1; ; n++ {
		e, err := s.Recv()
		if err != nil {
			return err
		}
		if w.dieAfter > 0 && n > w.dieAfter {
			w.die()
			return errKilled
		}
		if err := to.Send(e); err != nil {
			return err
		}
	}
}

// serve serves a replica of f at the address that it says; stop ends it as kill -9 does.
func (f *fleet) serve(t testing.TB, dieAfter int, o ...grpc.ServerOption) (addr string, stop func()) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr = ln.Addr().String()
	f.start(addr)
	f.mu.Lock()
	w := &wire{r: f.up[addr], dieAfter: dieAfter}
	f.mu.Unlock()
	s := grpc.NewServer(append(o, grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second}))...)
	registrypb.RegisterRegistrarServiceServer(s, w)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(ln) })
	end := sync.OnceFunc(func() {
		f.kill(addr, errKilled)
		s.Stop()
	})
	w.die = func() { go end() }
	t.Cleanup(func() { end(); wg.Wait() })
	return addr, end
}

// until waits for a condition that events bring about.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	late := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-time.After(time.Millisecond):
		case <-late:
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// TestLargeRow: a row as large as stores take, which not every registrar leaves out, ends no stream.
func TestLargeRow(t *testing.T) {
	f := newFleet()
	large := pod("10.0.0.1", healthy, false)
	large.Metadata = map[string]string{"notes": strings.Repeat("x", 3<<19)} // etcd's own bound
	f.add("shop/cart", large)
	f.add("shop/cart", pod("10.0.0.2", healthy, false))
	addr, _ := f.serve(t, 0)
	n := startNode(t, client.Config{Targets: []string{addr}, Whole: true})
	defer n.end()
	until(t, "both rows", func() bool { return len(n.heard.of(name("shop/cart"))) == 2 })
	if e := n.Errors.Value(); e != 0 {
		t.Errorf("%d streams failed", e)
	}
}

// TestKilled: a registrar that is killed in the middle of its snapshot, and one that is killed in the middle of a
// stream, are replaced by another one; what the node knew stays.
func TestKilled(t *testing.T) {
	f := newFleet()
	for i := range 300 {
		f.add("shop/cart", pod(fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250), healthy, true))
	}
	first, _ := f.serve(t, 200) // of 600
	second, kill := f.serve(t, 0)
	n := startNode(t, client.Config{Targets: []string{first, second}, Whole: true})
	defer n.end()
	full := func() bool { return len(n.heard.of(name("shop/cart"))) == 300 }
	until(t, "a first state", func() bool { return full() && n.heard.status().Connected }) // rows come before the state is whole
	n.heard.mu.Lock()
	n.heard.look = func(rows map[model.ServiceName][]string) {
		if l := len(rows[name("shop/cart")]); l < 300 {
			t.Errorf("%d rows are known", l)
		}
	}
	n.heard.mu.Unlock()
	kill()
	until(t, "that it has gone", func() bool { return !n.heard.status().Connected })
	if s := n.heard.status(); !strings.Contains(s.Err, "registrar 127.0.0.1:") {
		t.Errorf("%+v", s)
	}
	if !full() {
		t.Error("what was known has gone with it")
	}
}

// TestReplaced: the next registrar has the same name, another address and another history.
func TestReplaced(t *testing.T) {
	f := newFleet()
	f.add("shop/cart", pod("10.1.0.1", healthy, false))
	var mu sync.Mutex
	at, kill := f.serve(t, 0)
	n := startNode(t, client.Config{Targets: []string{"registrar:1"}, Whole: true,
		Resolve: func(context.Context, string) ([]string, error) { return []string{"127.0.0.1"}, nil },
		Dial: func(ctx context.Context, _ string) (registrypb.RegistrarServiceClient, io.Closer, error) {
			mu.Lock()
			defer mu.Unlock()
			c, err := grpc.NewClient("passthrough:///"+at, grpc.WithTransportCredentials(plain{}))
			if err != nil {
				return nil, nil, err
			}
			return registrypb.NewRegistrarServiceClient(c), c, nil
		}})
	defer n.end()
	until(t, "a first state", func() bool { return len(n.heard.of(name("shop/cart"))) == 1 })
	kill()
	f.add("shop/cart", pod("10.1.0.2", healthy, false))
	f.gone("shop/cart", "10.1.0.1")
	again, _ := f.serve(t, 0)
	mu.Lock()
	at = again
	mu.Unlock()
	until(t, "what its successor says", func() bool {
		l := n.heard.of(name("shop/cart"))
		return n.heard.status().Connected && len(l) == 1 && strings.Contains(l[0], "10.1.0.2")
	})
	f.add("shop/pay", pod("10.1.0.3", healthy, false))
	until(t, "a change", func() bool { return len(n.heard.of(name("shop/pay"))) == 1 })
	n.agrees(t, f, everything)
}

// TestTLS: the registrar and the node prove who they are; a registrar with another identity hears nothing.
func TestTLS(t *testing.T) {
	ca, err := devca.Open(t.TempDir(), "td", time.Now)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(id string) (spiffeid.ID, *mtls.SVID) {
		x, err := spiffeid.Parse(id)
		if err != nil {
			t.Fatal(err)
		}
		s, err := ca.Issue(x, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return x, s
	}
	registrar, server := issue("spiffe://td/ns/aether-system/sa/registrar")
	_, me := issue("spiffe://td/ns/aether-system/sa/proxy")
	stranger, _ := issue("spiffe://td/ns/shop/sa/cart")
	f := newFleet()
	f.add("shop/cart", pod("10.1.0.1", healthy, false))
	cfg := mtls.ServerConfig(mtls.Server{Pod: "registrar", SVID: func() *mtls.SVID { return server }, Serves: func(uint16) bool { return true }})
	at, _ := f.serve(t, 0, grpc.Creds(credentials.NewTLS(cfg)))
	svid := func() *mtls.SVID { return me }
	n := startNode(t, client.Config{Targets: []string{at}, Whole: true, Credentials: client.TLS(svid, registrar)})
	defer n.end()
	until(t, "a first state", func() bool { return len(n.heard.of(name("shop/cart"))) == 1 })
	for what, creds := range map[string]credentials.TransportCredentials{
		"another registrar's identity": client.TLS(svid, stranger),
		"no certificate yet":           client.TLS(func() *mtls.SVID { return nil }, registrar),
		"no TLS":                       nil,
	} {
		m := startNode(t, client.Config{Targets: []string{at}, Whole: true, Credentials: creds})
		until(t, what, func() bool { return m.heard.status().Err != "" })
		if m.heard.replaces != 0 {
			t.Errorf("%s: it hears something", what)
		}
		m.end()
	}
}

// plain is no TLS.
type plain struct {
	credentials.TransportCredentials
}

func (plain) ClientHandshake(_ context.Context, _ string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c, nil, nil
}
func (plain) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "insecure"}
}
func (p plain) Clone() credentials.TransportCredentials { return p }
func (plain) OverrideServerName(string) error           { return nil }
func (plain) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, tls.AlertError(0)
}

// size is how many services and endpoints there are.
const sizeVariable = "AETHER_TEST_REGISTRAR"

// TestMain is a registrar of a given size, if the environment says so: the memory of a node is measured without it.
func TestMain(m *testing.M) {
	size := os.Getenv(sizeVariable)
	if size == "" {
		os.Exit(m.Run())
	}
	var services, endpoints int
	if _, err := fmt.Sscanf(size, "%d %d", &services, &endpoints); err != nil {
		panic(err)
	}
	f := newFleet()
	f.fill(services, endpoints)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	f.start("it")
	s := grpc.NewServer()
	registrypb.RegisterRegistrarServiceServer(s, &wire{r: f.up["it"]})
	fmt.Println(ln.Addr())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); os.Exit(0) }() // with whoever started it
	panic(s.Serve(ln))
}

// fill makes so many endpoints of so many services, on 1,000 nodes in three zones.
func (f *fleet) fill(services, endpoints int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range endpoints {
		service := fmt.Sprintf("namespace-%d/service-%d", i%services%100, i%services)
		e := pod(fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), healthy, false)
		e.KubernetesMetadata.PodName = fmt.Sprintf("service-%d-6b7f9c5d4-%05d", i%services, i)
		e.KubernetesMetadata.NodeName = fmt.Sprintf("ip-10-0-%d.eu-west-1.compute.internal", i%1000)
		e.Locality = &registrypb.ServiceEndpoint_Locality{Region: "eu-west-1", Zone: "eu-west-1" + string(rune('a'+i%3))}
		f.setLocked(place{service, registrypb.Service_PROTOCOL_HTTP, e.Ip}, e)
		f.version++
	}
}

// registrar starts a registrar of that size as a process of its own.
func registrar(b testing.TB, services, endpoints int) (addr string) {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), sizeVariable+"="+strconv.Itoa(services)+" "+strconv.Itoa(endpoints))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(line)
}
