// Package setup says how an API server is started for tests: its flags, and the files that
// they name.
//
// It starts nothing, and needs neither testing nor a client of Kubernetes.
package setup

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Port of the server; the address is its own.
const Port = "6443"

// Server is an API server that can be started, with Args, any number of times: its
// clients' credentials stay good.
type Server struct {
	Addr  string // address and port
	Token string // the administrator's (group system:masters)
	CA    []byte // PEM, of the authority of its certificate
	Args  []string
}

// New writes the files of a server into dir, which is its own. It serves at ip, over the
// etcd at that URL. It authorizes by RBAC, and its Services' addresses are of 10.96.0.0/16.
func New(dir string, ip net.IP, etcd string) (*Server, error) {
	path := func(name string) string { return filepath.Join(dir, name) }
	random := make([]byte, 16)
	rand.Read(random) // never fails
	s := &Server{Addr: net.JoinHostPort(ip.String(), Port), Token: hex.EncodeToString(random), Args: []string{
		"--etcd-servers", etcd,
		"--bind-address", ip.String(), "--advertise-address", ip.String(), "--secure-port", Port,
		"--tls-cert-file", path("server.crt"), "--tls-private-key-file", path("server.key"),
		"--token-auth-file", path("tokens.csv"), "--authorization-mode", "RBAC",
		"--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", path("account.key"), "--service-account-signing-key-file", path("account.key"),
		"--service-cluster-ip-range", "10.96.0.0/16",
		"--endpoint-reconciler-type", "none", // an address of loopback may be nobody's endpoint
		"--allow-privileged",
	}}
	authority, err := newKey(path("ca.key"))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, root, root, authority.Public(), authority)
	if err != nil {
		return nil, err
	}
	s.CA = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	leaf, err := newKey(path("server.key"))
	if err != nil {
		return nil, err
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kube-apiserver"}, NotBefore: root.NotBefore, NotAfter: root.NotAfter,
		IPAddresses: []net.IP{ip}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if der, err = x509.CreateCertificate(rand.Reader, cert, root, leaf.Public(), authority); err != nil {
		return nil, err
	}
	if _, err = newKey(path("account.key")); err != nil {
		return nil, err
	}
	for name, b := range map[string][]byte{
		"server.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		"tokens.csv": []byte(s.Token + ",admin,1,system:masters\n"),
	} {
		if err := os.WriteFile(path(name), b, 0o600); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Kubeconfig is the administrator's, as a file has it.
func (s *Server) Kubeconfig() []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://%s", certificate-authority-data: %s}}]
users: [{name: test, user: {token: %s}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
current-context: test
`, s.Addr, base64.StdEncoding.EncodeToString(s.CA), s.Token)
}

// newKey makes a key and writes it to a file.
func newKey(file string) (*ecdsa.PrivateKey, error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		return nil, err
	}
	return k, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}
