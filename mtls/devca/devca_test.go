package devca

import (
	"context"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"aether/mtls"
	"aether/mtls/spiffeid"
)

func id(t *testing.T, s string) spiffeid.ID {
	t.Helper()
	v, err := spiffeid.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestOpen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	// Two nodes that start at once get one CA.
	var wg sync.WaitGroup
	cas := make([]*CA, 8)
	for i := range cas {
		wg.Go(func() {
			ca, err := Open(dir, "mesh.test", nil)
			if err != nil {
				t.Error(err)
				return
			}
			cas[i] = ca
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for _, ca := range cas {
		if !ca.cert.Equal(cas[0].cert) {
			t.Fatal("two CAs in one directory")
		}
	}
	c := cas[0].cert
	if c.Subject.CommonName != CommonName || !c.IsCA || !strings.Contains(CommonName, "not for production") {
		t.Errorf("the CA is %s", c.Subject)
	}
	if fi, err := os.Stat(filepath.Join(dir, "ca.key")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the key's mode: %v, %v", fi.Mode(), err)
	}
	for name, open := range map[string]func() error{
		"wanted spiffe://other.test": func() error { _, err := Open(dir, "other.test", nil); return err },
		"expired": func() error {
			_, err := Open(dir, "mesh.test", func() time.Time { return time.Now().Add(2 * Life) })
			return err
		},
		"trust domain": func() error { _, err := Open(dir, "Mesh", nil); return err },
		"was not made here": func() error {
			d := t.TempDir()
			if err := cas[0].WriteFiles(d, "t", "x", 0); err != nil {
				return err
			}
			for from, to := range map[string]string{"svid.pem": "ca.pem", "svid_key.pem": "ca.key"} {
				if err := os.Rename(filepath.Join(d, "t/x", from), filepath.Join(d, to)); err != nil {
					return err
				}
			}
			_, err := Open(d, "mesh.test", nil)
			return err
		},
	} {
		if err := open(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want an error with %q", err, name)
		}
	}
}

func TestIssue(t *testing.T) {
	ca, err := Open(t.TempDir(), "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ca.Issue(id(t, "spiffe://mesh.test/ns/a/sa/b"), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if d := time.Until(s.NotAfter); d > time.Minute || d < 50*time.Second {
		t.Errorf("valid for %s", d)
	}
	if got, err := spiffeid.FromCert(s.Cert.Leaf); err != nil || got != s.ID {
		t.Errorf("%v, %v", got, err)
	}
	if s.Cert.Leaf.KeyUsage != x509.KeyUsageDigitalSignature {
		t.Error("key usage", s.Cert.Leaf.KeyUsage)
	}
	long, err := ca.Issue(s.ID, 100*Life)
	if err != nil || long.NotAfter.After(ca.cert.NotAfter) {
		t.Errorf("a leaf outlives its CA: %v, %v", long.NotAfter, err)
	}
	for _, bad := range []string{"spiffe://other.test/a", "spiffe://mesh.test"} {
		if _, err := ca.Issue(id(t, bad), 0); err == nil {
			t.Errorf("issued %s", bad)
		}
	}
	if _, err := ca.Issue(s.ID, -1); err == nil {
		t.Error("issued for a negative time")
	}
}

// The source renews at half life, always with a new key, and ends with its context.
func TestSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca, err := Open(t.TempDir(), "mesh.test", nil)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Minute)
		defer cancel()
		var at []time.Duration
		keys := map[string]bool{}
		ref := mtls.Ref{Container: "c", ID: id(t, "spiffe://mesh.test/ns/a/sa/b")}
		err = ca.Source(time.Hour).Watch(ctx, ref, func(s *mtls.SVID, err error) {
			if err != nil || s.ID != ref.ID {
				t.Error(s, err)
				return
			}
			at = append(at, time.Since(start).Round(time.Minute))
			keys[string(s.Cert.Leaf.RawSubjectPublicKeyInfo)] = true
		})
		if err != context.DeadlineExceeded || len(at) != 4 || at[3] != 90*time.Minute || len(keys) != 4 {
			t.Errorf("%v, at %v, %d keys", err, at, len(keys))
		}
		errs := 0
		ref.ID = id(t, "spiffe://other.test/x")
		ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		ca.Source(0).Watch(ctx, ref, func(s *mtls.SVID, err error) {
			if err != nil && s == nil {
				errs++
			}
		})
		if errs < 5 || errs > 11 {
			t.Errorf("%d errors in ten seconds", errs)
		}
	})
}

// TestClockIsSet: a certificate that the clock has left behind, whichever way it was set, is
// replaced at once, and not when half of its life has passed.
func TestClockIsSet(t *testing.T) {
	for _, by := range []time.Duration{5 * time.Hour, -5 * time.Hour, DefaultTTL * 3 / 4} {
		t.Run(by.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var set atomic.Int64
				now := func() time.Time { return time.Now().Add(time.Duration(set.Load())) }
				set.Store(int64(-10 * time.Hour)) // the authority itself is older than all of it
				ca, err := Open(t.TempDir(), "mesh.test", now)
				if err != nil {
					t.Fatal(err)
				}
				set.Store(0)
				ctx, cancel := context.WithCancel(t.Context())
				var mu sync.Mutex
				var given []*mtls.SVID
				done := make(chan struct{})
				go func() {
					defer close(done)
					_ = ca.Source(0).Watch(ctx, mtls.Ref{ID: id(t, "spiffe://mesh.test/ns/shop/sa/cart")}, func(s *mtls.SVID, err error) {
						mu.Lock()
						defer mu.Unlock()
						if err != nil {
							t.Error(err)
						}
						given = append(given, s)
					})
				}()
				<-time.After(time.Minute)
				set.Store(int64(by))
				<-time.After(look)
				synctest.Wait()
				mu.Lock()
				last := given[len(given)-1]
				if leaf := last.Cert.Leaf; len(given) != 2 || now().Before(leaf.NotBefore) || !now().Before(leaf.NotAfter.Add(-DefaultTTL/2)) {
					t.Errorf("%d certificates; the last is valid from %s to %s, and it is %s", len(given), leaf.NotBefore, leaf.NotAfter, now())
				}
				mu.Unlock()
				cancel()
				<-done
			})
		})
	}
}
