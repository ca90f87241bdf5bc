package files

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

type event struct {
	svid *mtls.SVID
	err  error
}

// watch starts a watch of shop/cart in dir; the events come one by one.
func watch(t *testing.T, s *Source, account string) (events chan event, stop func()) {
	t.Helper()
	id, err := spiffeid.ForServiceAccount("mesh.test", "shop", account)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	events = make(chan event, 100)
	done := make(chan error, 1)
	go func() {
		done <- s.Watch(ctx, mtls.Ref{Container: "c", Namespace: "shop", Account: account, ID: id}, func(v *mtls.SVID, err error) { events <- event{v, err} })
	}()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != context.Canceled {
				t.Error(err)
			}
		})
	}
	t.Cleanup(stop)
	return events, stop
}

func next(t *testing.T, events chan event) event {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(20 * time.Second):
		t.Fatal("nothing was noticed")
		panic("unreachable")
	}
}

// good waits for an SVID, letting errors of half-written sets pass.
func good(t *testing.T, events chan event) *mtls.SVID {
	t.Helper()
	for {
		if e := next(t, events); e.svid != nil {
			return e.svid
		}
	}
}

func bad(t *testing.T, events chan event, want string) {
	t.Helper()
	if e := next(t, events); e.svid != nil || e.err == nil || !strings.Contains(e.err.Error(), want) {
		t.Fatalf("got %v, %v; want an error with %q", e.svid, e.err, want)
	}
}

func TestWatch(t *testing.T) {
	ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "ids")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(account string) {
		t.Helper()
		if err := ca.WriteFiles(dir, "shop", account, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	// Reread is out of the way: every change below must be noticed.
	s := New(Config{Dir: dir, Settle: 20 * time.Millisecond, Reread: time.Hour})
	events, stop := watch(t, s, "cart")
	bad(t, events, "no such file")

	write("cart") // the directories are new, too
	first := good(t, events)
	if first.ID.String() != "spiffe://mesh.test/ns/shop/sa/cart" || first.TrustDomain != "mesh.test" {
		t.Errorf("%+v", first)
	}
	write("cart")
	second := good(t, events)
	if second.Cert.Leaf.Equal(first.Cert.Leaf) {
		t.Error("not reloaded")
	}

	at := func(name string) string { return filepath.Join(dir, "shop/cart", name) }
	read := func(name string) []byte {
		t.Helper()
		b, err := os.ReadFile(at(name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	put := func(name string, b []byte) {
		t.Helper()
		if err := os.WriteFile(at(name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	keyPEM, certPEM, bundle := read(KeyFile), read(CertFile), read(BundleFile)
	put(CertFile, certPEM[:len(certPEM)/2]) // half-written
	bad(t, events, CertFile)
	put(CertFile, certPEM)
	if again := good(t, events); !again.Cert.Leaf.Equal(second.Cert.Leaf) { // mended is told, though nothing is new
		t.Error("another one")
	}
	put(BundleFile, append(bundle, "-----BEGIN CERTIFICATE-----\nMIIB"...))
	bad(t, events, "cut short")
	put(BundleFile, bundle)
	good(t, events)
	write("other")
	other, err := os.ReadFile(filepath.Join(dir, "shop/other", KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	put(KeyFile, other) // somebody else's key
	bad(t, events, "private key does not match")
	put(KeyFile, keyPEM)

	// All gone and back: noticed through the parent directory.
	if err := os.RemoveAll(filepath.Join(dir, "shop")); err != nil {
		t.Fatal(err)
	}
	bad(t, events, "no such file")
	write("cart")
	if v := good(t, events); v.Cert.Leaf.Equal(second.Cert.Leaf) {
		t.Error("an old certificate came back")
	}

	// A second watch shares the instance, and its end does not end the first.
	events2, stop2 := watch(t, s, "cart")
	good(t, events2)
	stop2()
	write("cart")
	good(t, events)
	stop()
	if s.hub != nil || s.uses != 0 {
		t.Error("the hub outlived the last watch")
	}
}

// Kubernetes swaps a symbolic link instead of writing files.
func TestSymlinkSwap(t *testing.T) {
	ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	at := filepath.Join(dir, "shop/cart")
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	version := func(name string) {
		t.Helper()
		tmp := t.TempDir()
		if err := ca.WriteFiles(tmp, "shop", "cart", time.Hour); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(tmp, "shop/cart"), filepath.Join(at, name)); err != nil {
			t.Fatal(err)
		}
		link := filepath.Join(at, "..data_tmp")
		if err := os.Symlink(name, link); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(link, filepath.Join(at, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version("..1")
	for _, f := range []string{CertFile, KeyFile, BundleFile} {
		if err := os.Symlink("..data/"+f, filepath.Join(at, f)); err != nil {
			t.Fatal(err)
		}
	}
	events, _ := watch(t, New(Config{Dir: dir, Settle: 20 * time.Millisecond, Reread: time.Hour}), "cart")
	first := good(t, events)
	version("..2")
	if good(t, events).Cert.Leaf.Equal(first.Cert.Leaf) {
		t.Error("the swap was not seen")
	}
}

// Without any event the files are read again now and then.
func TestReread(t *testing.T) {
	ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "later") // not there: nothing to watch
	events, _ := watch(t, New(Config{Dir: dir, Reread: 10 * time.Millisecond}), "cart")
	bad(t, events, "no such file")
	if err := ca.WriteFiles(dir, "shop", "cart", time.Hour); err != nil {
		t.Fatal(err)
	}
	good(t, events)
}

func TestBadNames(t *testing.T) {
	s := New(Config{Dir: t.TempDir()})
	for _, r := range []mtls.Ref{{Namespace: "..", Account: "a"}, {Namespace: "a", Account: "../b"}, {Namespace: "a"}} {
		if err := s.Watch(t.Context(), r, func(*mtls.SVID, error) {}); err == nil {
			t.Errorf("%+v was watched", r)
		}
	}
}
