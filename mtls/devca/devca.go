// Package devca is a THROW-AWAY certificate authority for trials, demos and
// tests. NOT FOR PRODUCTION: whoever reads its directory can be any workload.
// It attests nobody, revokes nothing and keeps its key in a file.
//
//   - What it issues says so: the CA's common name is CommonName.
//   - Two nodes that share its directory share its trust domain.
//   - A leaf never outlives the CA.
//
// It knows SPIFFE IDs and files. In production identities come from SPIRE or from
// files that something else writes (package files).
package devca

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"aether/mtls"
	"aether/mtls/spiffeid"
)

// CommonName is what every CA of this package is called.
const CommonName = "aether throw-away CA - not for production"

// Life is how long the CA itself is valid.
const Life = 365 * 24 * time.Hour

// DefaultTTL is the life of a leaf when none is given.
const DefaultTTL = time.Hour

// backdate makes certificates valid for nodes whose clock is a little late.
const backdate = time.Minute

// CA issues certificates. Safe for concurrent use.
type CA struct {
	td   string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	now  func() time.Time
}

// Open returns the CA of trust domain td in dir, which it makes when it is not
// there: ca.pem and ca.key (mode 0600), under the lock ca.lock, so that any number
// of processes may open the same directory at once. now may be nil: time.Now. It
// is an error when the CA there is of another trust domain or has expired.
func Open(dir, td string, now func() time.Time) (*CA, error) {
	if err := spiffeid.CheckTrustDomain(td); err != nil {
		return nil, fmt.Errorf("devca: open %s: %w", dir, err)
	}
	if now == nil {
		now = time.Now
	}
	ca, err := open(dir, td, now)
	if err != nil {
		return nil, fmt.Errorf("devca: open %s: %w", dir, err)
	}
	return ca, nil
}

func open(dir, td string, now func() time.Time) (*CA, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "ca.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer lock.Close() // and with it the lock
	for {
		if err = unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	ca := &CA{td: td, now: now}
	certFile, keyFile := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key")
	certPEM, err := os.ReadFile(certFile)
	if errors.Is(err, os.ErrNotExist) {
		return ca, ca.create(certFile, keyFile)
	}
	if err != nil {
		return nil, err
	}
	keyPEM, err := os.ReadFile(keyFile)
	if err != nil {
		return nil, err
	}
	return ca, ca.load(certPEM, keyPEM)
}

func (ca *CA) create(certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	now := ca.now()
	t := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{CommonName: CommonName},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(Life),
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: ca.td}},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return err
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return err
	}
	certPEM := encodeCerts(der)
	// The certificate last: a CA without its key is never seen.
	if err := replace(keyFile, keyPEM, 0o600); err != nil {
		return err
	}
	if err := replace(certFile, certPEM, 0o644); err != nil {
		return err
	}
	return ca.load(certPEM, keyPEM)
}

func (ca *CA) load(certPEM, keyPEM []byte) error {
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return fmt.Errorf("ca.pem and ca.key: %w", err)
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return fmt.Errorf("ca.key is a %T: it was not made here", pair.PrivateKey)
	}
	c := pair.Leaf
	if !c.IsCA || c.Subject.CommonName != CommonName {
		return fmt.Errorf("ca.pem is %q: it was not made here, and a real CA's key must not be used here", c.Subject)
	}
	if want := "spiffe://" + ca.td; len(c.URIs) != 1 || c.URIs[0].String() != want {
		return fmt.Errorf("the CA is of %v, wanted %s: take another directory, or remove ca.pem and ca.key", c.URIs, want)
	}
	if now := ca.now(); !now.Before(c.NotAfter) {
		return fmt.Errorf("the CA expired at %s: remove ca.pem and ca.key, then restart every node that uses them", c.NotAfter.UTC().Format(time.RFC3339))
	}
	ca.cert, ca.key = c, key
	return nil
}

// TrustDomain returns the CA's trust domain.
func (ca *CA) TrustDomain() string { return ca.td }

// Roots returns the trust bundle.
func (ca *CA) Roots() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(ca.cert)
	return p
}

// Bundle returns the trust bundle in PEM.
func (ca *CA) Bundle() []byte { return encodeCerts(ca.cert.Raw) }

// Issue returns a new key and certificate of identity id, valid for ttl (0:
// DefaultTTL) or as long as the CA is, whichever ends first. id must be of the CA's
// trust domain and have a path.
func (ca *CA) Issue(id spiffeid.ID, ttl time.Duration) (*mtls.SVID, error) {
	if ttl == 0 {
		ttl = DefaultTTL
	}
	svid, err := ca.issue(id, ttl)
	if err != nil {
		return nil, fmt.Errorf("devca: issue %s: %w", id, err)
	}
	return svid, nil
}

func (ca *CA) issue(id spiffeid.ID, ttl time.Duration) (*mtls.SVID, error) {
	switch {
	case ttl < 0:
		return nil, fmt.Errorf("a life of %s", ttl)
	case id.TrustDomain() != ca.td:
		return nil, fmt.Errorf("the CA is of trust domain %s", ca.td)
	case id.Path() == "":
		return nil, errors.New("it names a trust domain, not a workload")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := ca.now()
	end := now.Add(ttl)
	if ca.cert.NotAfter.Before(end) {
		end = ca.cert.NotAfter
	}
	t := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{Organization: []string{"aether throw-away"}},
		NotBefore:             now.Add(-backdate),
		NotAfter:              end,
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: id.TrustDomain(), Path: id.Path()}},
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, ca.cert, key.Public(), ca.key)
	if err != nil {
		return nil, err
	}
	return mtls.NewSVID(tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, []*x509.Certificate{ca.cert}, now)
}

// Source returns a Source that issues certificates of life ttl (0: DefaultTTL)
// for whatever identity is asked for, and a new one at half of each one's life.
func (ca *CA) Source(ttl time.Duration) mtls.Source {
	if ttl == 0 {
		ttl = DefaultTTL
	}
	return &source{ca, ttl}
}

type source struct {
	ca  *CA
	ttl time.Duration
}

const (
	retry = time.Second // after a failed issue
	// look is how often it is looked whether a certificate is to be renewed: the clock that it
	// is verified by may be set.
	look = 10 * time.Second
)

// Watch is of mtls.Source; it issues r.ID.
func (s *source) Watch(ctx context.Context, r mtls.Ref, on func(*mtls.SVID, error)) error {
	for {
		made := s.wall()
		svid, err := s.ca.Issue(r.ID, s.ttl)
		on(svid, err)
		for wait := retry; wait > 0; {
			t := time.NewTimer(wait)
			select {
			case <-ctx.Done():
				t.Stop()
				return ctx.Err()
			case <-t.C:
			}
			if err != nil {
				break
			}
			wait = s.due(made, svid.NotAfter)
		}
	}
}

// due is how long to wait before one looks again at a certificate made then; 0: it is to
// be renewed, at half of its life or because it is not valid yet.
func (s *source) due(made, end time.Time) time.Duration {
	now, half := s.wall(), made.Add(end.Sub(made)/2)
	if !now.Before(half) || now.Before(made.Add(-backdate)) {
		return 0
	}
	return min(half.Sub(now), look)
}

// wall is the time by which certificates are verified: differences of it show that the clock was set.
func (s *source) wall() time.Time { return s.ca.now().Round(0) }

// WriteFiles issues a certificate for ServiceAccount account of namespace ns, of
// life ttl (0: DefaultTTL), and writes it to dir/<ns>/<account> as package files
// reads it. Key and certificate are two files: a reader may see the one new and
// the other old for a moment.
func (ca *CA) WriteFiles(dir, ns, account string, ttl time.Duration) error {
	id, err := spiffeid.ForServiceAccount(ca.td, ns, account)
	if err != nil {
		return fmt.Errorf("devca: write files: %w", err)
	}
	svid, err := ca.Issue(id, ttl)
	if err != nil {
		return err
	}
	keyPEM, err := encodeKey(svid.Cert.PrivateKey.(*ecdsa.PrivateKey))
	if err != nil {
		return fmt.Errorf("devca: write files: %w", err)
	}
	at := filepath.Join(dir, ns, account)
	if err := os.MkdirAll(at, 0o700); err != nil {
		return fmt.Errorf("devca: write files: %w", err)
	}
	for _, f := range []struct {
		name string
		data []byte
		mode os.FileMode
	}{
		{"svid_bundle.pem", ca.Bundle(), 0o644},
		{"svid_key.pem", keyPEM, 0o600},
		{"svid.pem", encodeCerts(svid.Cert.Certificate...), 0o644},
	} {
		if err := replace(filepath.Join(at, f.name), f.data, f.mode); err != nil {
			return fmt.Errorf("devca: write files: %w", err)
		}
	}
	return nil
}

// replace writes a file so that readers see all of the old or all of the new.
func replace(name string, data []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".tmp-*") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

func encodeCerts(ders ...[]byte) []byte {
	var b bytes.Buffer
	for _, der := range ders {
		pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: der}) // to memory: cannot fail
	}
	return b.Bytes()
}

func encodeKey(k *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// serial returns a random positive number of 16 bytes at most (RFC 5280 4.1.2.2).
func serial() *big.Int {
	b := make([]byte, 16)
	rand.Read(b) // never fails
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b)
}
