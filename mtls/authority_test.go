package mtls_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aether/mtls"
)

// authority is a CA that does not mind whether what it issues outlives it, as one made by hand does not.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string, life time.Duration) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{key: key}
	a.cert = a.sign(t, &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true, KeyUsage: x509.KeyUsageCertSign}, key, life)
	return a
}

// sign signs what template holds, by itself where a has no certificate yet.
func (a *authority) sign(t *testing.T, template *x509.Certificate, key *ecdsa.PrivateKey, life time.Duration) *x509.Certificate {
	t.Helper()
	template.SerialNumber, template.BasicConstraintsValid = big.NewInt(1), true
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(life)
	parent := a.cert
	if parent == nil {
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (a *authority) issue(t *testing.T, name string, life time.Duration, bundle ...*authority) *mtls.SVID {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse("spiffe://mesh.test/ns/t/sa/" + name)
	if err != nil {
		t.Fatal(err)
	}
	c := a.sign(t, &x509.Certificate{URIs: []*url.URL{u}, KeyUsage: x509.KeyUsageDigitalSignature}, key, life)
	var all []*x509.Certificate
	for _, b := range bundle {
		all = append(all, b.cert)
	}
	v, err := mtls.NewSVID(tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: key}, all, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestAuthorityEnds: nothing holds longer than the authority that it is of: neither a pod's own certificate nor a peer's
// that was verified while the authority held. Two bundles, of which one authority ends first, and both ends of a session.
func TestAuthorityEnds(t *testing.T) {
	const short, long = 2 * time.Hour, 10 * time.Hour
	synctest.Test(t, func(t *testing.T) {
		old, fresh := newAuthority(t, "old", short), newAuthority(t, "fresh", 2*long)
		if v := old.issue(t, "cart", long, old, fresh); time.Until(v.NotAfter) > short {
			t.Errorf("a certificate of %v whose authority ends after %v holds for %v", long, short, time.Until(v.NotAfter))
		}
		cross := &authority{cert: fresh.sign(t, &x509.Certificate{Subject: old.cert.Subject, IsCA: true, KeyUsage: x509.KeyUsageCertSign}, old.key, long), key: old.key}
		if v := old.issue(t, "cart", long, old, cross); time.Until(v.NotAfter) <= short {
			t.Errorf("a certificate that another authority vouches for holds for %v", time.Until(v.NotAfter))
		}

		own, peer := fresh.issue(t, "cart", long, old, fresh), old.issue(t, "web", long, old)
		src, changes := &push{}, make(chan *mtls.SVID, 10)
		st := mtls.NewStore(mtls.Config{Source: src, Changed: func(_ mtls.Ref, s *mtls.SVID, err error) {
			if err == nil {
				changes <- s
			}
		}})
		st.Add(mtls.Ref{Container: "c1", Namespace: "t", Account: "cart", ID: own.ID})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- st.Run(ctx) }()
		synctest.Wait()
		src.send("c1", own, nil)
		if got := <-changes; got != own || st.Current("c1") != own {
			t.Error("a certificate whose authorities hold is changed")
		}
		leaf, err := x509.ParseCertificate(peer.Cert.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		bond := &mtls.Bond{Own: own, Peer: []*x509.Certificate{leaf}, Use: x509.ExtKeyUsageAny}

		time.Sleep(short - time.Second) // virtual
		synctest.Wait()
		if err := bond.Judge(st.Current("c1"), time.Now()); err != nil || len(changes) != 0 {
			t.Errorf("a second before: %v, %d changes", err, len(changes))
		}
		time.Sleep(time.Second)
		synctest.Wait()
		now := st.Current("c1")
		if len(changes) != 1 || now == nil || len(now.Authorities) != 1 || now.NotAfter != own.NotAfter {
			t.Fatalf("%d changes, %+v", len(changes), now)
		}
		if err := bond.Judge(now, time.Now()); err == nil || !strings.Contains(err.Error(), "trusted no more") {
			t.Errorf("the session with a peer whose authority has ended: %v", err)
		}
		if <-changes != now {
			t.Error("another certificate is said than is in force")
		}
		time.Sleep(3 * long)
		synctest.Wait()
		if st.Current("c1") != nil || len(st.Held()[0].SVID.Authorities) != 0 {
			t.Error("what is over is in force")
		}
		src.send("c1", own, nil) // a source that lags
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if len(changes) > 1 {
			t.Errorf("%d changes at the end", len(changes))
		}
	})
}
