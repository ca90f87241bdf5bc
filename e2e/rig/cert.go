package rig

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// CA is a throw-away certificate authority (P-256) of one SPIFFE trust domain.
// Its key is in memory only. Safe for concurrent use.
type CA struct {
	TrustDomain string
	Cert        *x509.Certificate
	PEM         []byte // the bundle: the authority's certificate

	key *ecdsa.PrivateKey
}

// SVID is an X.509-SVID with its key.
type SVID struct {
	Namespace, Account string

	ID     string // spiffe://<trust domain>/ns/<namespace>/sa/<account> unless the request said otherwise
	Cert   []byte // PEM, leaf only: the authority signs it itself
	Key    []byte // PEM, PKCS #8
	Bundle []byte // PEM, the trust domain's authorities
}

// SVIDRequest of Issue; the zero values of all but the first two are usable.
type SVIDRequest struct {
	Namespace, Account string
	ID                 string    // empty: the usual one
	NotBefore          time.Time // zero: an hour ago
	NotAfter           time.Time // zero: in 24 hours
}

// NewCA makes an authority, valid for a day, for the trust domain ("rig.test").
func NewCA(trustDomain string) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("rig: key of the authority: %w", err)
	}
	tmpl := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{Organization: []string{"aether rig"}, CommonName: "authority of " + trustDomain},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: trustDomain}},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("rig: certificate of the authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("rig: certificate of the authority: %w", err)
	}
	return &CA{TrustDomain: trustDomain, Cert: cert, PEM: pemOf("CERTIFICATE", der), key: key}, nil
}

// Pool holds the authority, for verification.
func (ca *CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(ca.Cert)
	return pool
}

// Issue makes an SVID with a new key (P-256).
func (ca *CA) Issue(req SVIDRequest) (*SVID, error) {
	if req.ID == "" {
		req.ID = fmt.Sprintf("spiffe://%s/ns/%s/sa/%s", ca.TrustDomain, req.Namespace, req.Account)
	}
	if req.NotBefore.IsZero() {
		req.NotBefore = time.Now().Add(-time.Hour)
	}
	if req.NotAfter.IsZero() {
		req.NotAfter = time.Now().Add(24 * time.Hour)
	}
	fail := func(err error) (*SVID, error) {
		return nil, fmt.Errorf("rig: issue %s: %w", req.ID, err)
	}
	id, err := url.Parse(req.ID)
	if err != nil {
		return fail(err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return fail(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fail(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial,
		// Not the authority's own subject: OpenSSL would take the leaf for self-signed.
		Subject:               pkix.Name{Organization: []string{"aether rig"}},
		NotBefore:             req.NotBefore,
		NotAfter:              req.NotAfter,
		URIs:                  []*url.URL{id},
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.Cert, key.Public(), ca.key)
	if err != nil {
		return fail(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fail(err)
	}
	return &SVID{
		Namespace: req.Namespace, Account: req.Account, ID: req.ID,
		Cert: pemOf("CERTIFICATE", der), Key: pemOf("PRIVATE KEY", pkcs8), Bundle: ca.PEM,
	}, nil
}

// TLS is the SVID as crypto/tls wants it.
func (s *SVID) TLS() (tls.Certificate, error) {
	c, err := tls.X509KeyPair(s.Cert, s.Key)
	if err != nil {
		return c, fmt.Errorf("rig: %s: %w", s.ID, err)
	}
	return c, nil
}

// Files of an SVID, as the proxy's file source (and spiffe-helper) lay them out.
const (
	CertFile   = "svid.pem"
	KeyFile    = "svid_key.pem"
	BundleFile = "svid_bundle.pem"
)

// Write puts the SVID into <dir>/<namespace>/<account>/ and returns that path. Each file
// is replaced whole, the key first and the certificate last, so that a watcher
// of the certificate finds its key there.
func (s *SVID) Write(dir string) (string, error) {
	d := filepath.Join(dir, s.Namespace, s.Account)
	if err := os.MkdirAll(d, 0o755); err != nil {
		return "", fmt.Errorf("rig: write %s: %w", s.ID, err)
	}
	for _, f := range []struct {
		name string
		data []byte
	}{{KeyFile, s.Key}, {BundleFile, s.Bundle}, {CertFile, s.Cert}} {
		if err := replace(filepath.Join(d, f.name), f.data, 0o600); err != nil {
			return "", fmt.Errorf("rig: write %s: %w", s.ID, err)
		}
	}
	return d, nil
}

// WriteCombined puts certificate and key into one file, as HAProxy's crt wants them.
func (s *SVID) WriteCombined(path string) error {
	if err := replace(path, append(append([]byte(nil), s.Cert...), s.Key...), 0o600); err != nil {
		return fmt.Errorf("rig: write %s: %w", s.ID, err)
	}
	return nil
}

// replace writes a file whole or not at all.
func replace(path string, data []byte, mode os.FileMode) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, mode); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

func pemOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
