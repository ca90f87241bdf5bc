package main

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

const patience = 20 * time.Second

// parsed are the options of a command line.
func parsed(t *testing.T, args ...string) options {
	t.Helper()
	var o options
	if err := command(&o).ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	if o.trustDomain == "" {
		o.trustDomain = o.domain
	}
	return o
}

// serving runs a registrar over store, and gives its two addresses and what ends it.
func serving(t *testing.T, store backend, args ...string) (rpc, admin string, stop func()) {
	t.Helper()
	o := parsed(t, append([]string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--drain-time", "0s"}, args...)...)
	ctx, cancel := context.WithCancel(context.Background())
	type addrs struct{ rpc, admin net.Addr }
	at, done := make(chan addrs, 1), make(chan error, 1)
	go func() {
		done <- serve(ctx, o, store, slog.New(slog.DiscardHandler), func(r, a net.Addr) { at <- addrs{r, a} })
	}()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("it ended with %v", err)
		}
	}
	t.Cleanup(stop)
	select {
	case a := <-at:
		return a.rpc.String(), a.admin.String(), stop
	case err := <-done:
		t.Fatal(err)
	case <-time.After(patience):
		t.Fatal("it does not listen")
	}
	return "", "", nil
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// TestReadiness: ready once the store's rows are here, and still so when the store
// goes away; healthy all the time.
func TestReadiness(t *testing.T) {
	store := storetest.New("local", "local")
	store.Set(storetest.Rows("local", "local", model.ServiceName{Namespace: "shop", Name: "cart"}, storetest.HTTP("10.0.0.1", "n"))...)
	store.Down(errors.New("no route to etcd"))
	_, admin, _ := serving(t, backend{Store: store}, "--insecure")
	until(t, "the reason", func() bool {
		code, body := get(t, "http://"+admin+"/readyz")
		return code == http.StatusServiceUnavailable && strings.Contains(body, "no route to etcd")
	})
	if code, _ := get(t, "http://"+admin+"/healthz"); code != http.StatusOK {
		t.Errorf("/healthz: %d", code)
	}
	store.Up()
	ready := func() bool { code, _ := get(t, "http://"+admin+"/readyz"); return code == http.StatusOK }
	until(t, "readiness", ready)
	store.Down(errors.New("no route to etcd"))
	until(t, "it to be known", func() bool {
		_, body := get(t, "http://"+admin+"/status")
		return strings.Contains(body, "no route to etcd")
	})
	if !ready() {
		t.Error("not ready because the store is away, though its rows are here")
	}
	_, body := get(t, "http://"+admin+"/metrics")
	for _, want := range []string{ // contract 14.4
		"aether_registrar_snapshot_version 1\n", "aether_registrar_snapshot_rows 1\n", "aether_registrar_watchers 0\n", "aether_registrar_watch_filtered_subscribers 0\n",
		"aether_registrar_sync_total 1\n", "aether_registrar_sync_errors_total 2\n", "aether_registrar_sync_connected 0\n", "aether_registrar_broadcast_events_total 0\n",
		"aether_registrar_writebehind_pending 0\n", "aether_registrar_rows_refused_total{reason=\"no_ports\"} 0\n", "go_goroutines ",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("/metrics does not say %q", want)
		}
	}
	if strings.Contains(body, "aether_requests_total") || strings.Contains(body, "aether_duration_seconds") {
		t.Error("/metrics has the families of a proxy")
	}
	if code, _ := get(t, "http://"+admin+"/debug/pprof/cmdline"); code != http.StatusOK {
		t.Errorf("pprof: %d", code)
	}
}

// TestCalls: over TLS the node's agent may write, by the flag's default; without TLS
// everybody may.
func TestCalls(t *testing.T) {
	dir := t.TempDir()
	ca, err := devca.Open(dir, "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	id := func(ns, account string) spiffeid.ID {
		id, err := spiffeid.ForServiceAccount("mesh.test", ns, account)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	row := &registrypb.RegisterEndpointRequest{ServiceName: "shop/cart", Endpoint: storetest.HTTP("10.0.0.1", "n")}
	call := func(addr string, creds credentials.TransportCredentials) error {
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err = registrypb.NewRegistrarServiceClient(conn).RegisterEndpoint(ctx, row, grpc.WaitForReady(true))
		return err
	}
	as := func(who spiffeid.ID) credentials.TransportCredentials {
		svid, err := ca.Issue(who, 0)
		if err != nil {
			t.Fatal(err)
		}
		return credentials.NewTLS(mtls.ClientConfig(mtls.Client{SVID: svid, SNI: "8443", ALPN: []string{"h2"}, Pin: id("aether-system", "aether-registrar")}))
	}
	secure, admin, stop := serving(t, backend{Store: storetest.New("local", "local")}, "--dev-ca", dir, "--trust-domain", "mesh.test")
	until(t, "readiness", func() bool { code, _ := get(t, "http://"+admin+"/readyz"); return code == http.StatusOK })
	if err := call(secure, as(id("aether-system", "aether-agent"))); err != nil {
		t.Errorf("the agent: %v", err)
	}
	if err := call(secure, as(id("shop", "cart"))); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a pod: %v, want PermissionDenied", err)
	}
	stop()
	if _, err := tls.Dial("tcp", secure, &tls.Config{InsecureSkipVerify: true}); err == nil {
		t.Error("it listens after its end")
	}

	secure, _, _ = serving(t, backend{Store: storetest.New("local", "local")}, "--dev-ca", dir, "--trust-domain", "mesh.test", "--writer", "/ns/a/sa/b,spiffe://mesh.test/ns/shop/sa/cart")
	if err := call(secure, as(id("shop", "cart"))); err != nil {
		t.Errorf("whom --writer names: %v", err)
	}
	plain, _, _ := serving(t, backend{Store: storetest.New("local", "local")}, "--insecure")
	if err := call(plain, insecure.NewCredentials()); err != nil {
		t.Errorf("without TLS: %v", err)
	}
}

// TestOptions: what cannot be meant is refused before anything is opened, and says
// what to do.
func TestOptions(t *testing.T) {
	if err := run(t.Context(), parsed(t)); err == nil || !strings.Contains(err.Error(), "--etcd-endpoints is required") {
		t.Errorf("no options: %v", err)
	}
	for _, tt := range []struct{ args, says string }{

		{"--store mysql", `"mysql" is neither`},
		{"--store kubernetes", "excludes --etcd-endpoints"},
		{"--listen 127.0.0.1:0 --insecure --services maybe", `"maybe" is none of`},
		{"--listen 127.0.0.1:0 --insecure --services on", "give a kubeconfig"},
		{"--listen 127.0.0.1:0 --insecure --kubeconfig /does/not/exist", "/does/not/exist"},
		{"--insecure", "give --listen 127.0.0.1:8443"},
		{"--insecure --listen 10.0.0.1:8443", "no loopback address"},
		{"--insecure --listen localhost:8443", "no loopback address"},
		{"--listen 127.0.0.1:0", "--certs"},
		{"--listen 127.0.0.1:0 --certs /a --dev-ca /b", "exclude each other"},
		{"--listen 127.0.0.1:0 --insecure --certs /a", "excludes"},
		{"--listen 127.0.0.1:0 --certs /a --writer agent", "--writer"},
		{"--listen 127.0.0.1:0 --certs /a --writer /node/{node}/{node}", "{node} is to stand in it once"},
		{"--listen 127.0.0.1:0 --insecure --allow-spiffe-id app", "--allow-spiffe-id"},
		{"--listen 127.0.0.1:0 --insecure --allow-spiffe-id spiffe://other", "names a whole trust domain"},
		{"--listen 127.0.0.1:0 --certs /a --trust-domain Not!", "--trust-domain"},
		{"--etcd-user u", "come together"},
		{"--etcd-user u --etcd-password-file /does/not/exist", "--etcd-password-file"},
		{"--etcd-cert c", "come together"},
		{"--etcd-ca /does/not/exist", "/does/not/exist"},
		{"--log-level loud", "--log-level"},
		{"--log-format xml", "--log-format"},
		{"--drain-time -1s", "--drain-time"},
	} {
		o := parsed(t, append([]string{"--etcd-endpoints", "http://127.0.0.1:1"}, strings.Fields(tt.args)...)...)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err := run(ctx, o)
		if ctx.Err() != nil {
			t.Errorf("%s: it ran", tt.args)
		}
		cancel()
		if err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q", tt.args, err, tt.says)
		}
	}
}

// TestWriters: who may write, and which node's rows alone, by --writer.
func TestWriters(t *testing.T) {
	const td = "spiffe://td.example"
	for _, tt := range []struct {
		writers, id, node string
		may               bool
	}{
		{"/ns/a/sa/b", "/ns/a/sa/b", "", true},
		{"/ns/a/sa/b", "/ns/a/sa/c", "", false},
		{"/ns/a/sa/b", "/node/n1", "", false}, // nothing is let in that is not named
		{"/node/{node}", "/node/n1", "n1", true},
		{"/node/{node}", "/node/n1/x", "", false},
		{"/node/{node}", "/ns/a/sa/b", "", false},
		{"/ns/a/sa/b,/node/{node}", "/node/n1", "n1", true},
		{"/ns/a/sa/b,/node/{node}", "/ns/a/sa/b", "", true},
		{"/node/special,/node/{node}", "/node/special", "", true},
		{"*", "/ns/a/sa/b", "", true},
		{"*,/node/{node}", "/node/n1", "n1", true},
	} {
		may, node, err := writer(parsed(t, "--trust-domain", "td.example", "--writer", tt.writers))
		if err != nil {
			t.Fatal(err)
		}
		id, err := spiffeid.Parse(td + tt.id)
		if err != nil {
			t.Fatal(err)
		}
		if got := may == nil || may(id); got != tt.may || tt.may && node(id) != tt.node {
			t.Errorf("--writer %s: %s may: %t, of node %q, want %t, %q", tt.writers, tt.id, got, node(id), tt.may, tt.node)
		}
	}
}
