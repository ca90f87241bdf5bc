package spiffeid

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"math/big"
	"net/url"
	"regexp"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	long := "spiffe://td/" + strings.Repeat("a", 2048-12)
	for _, tt := range []struct{ in, td, path, err string }{
		{in: "spiffe://aether.internal/ns/shop/sa/cart", td: "aether.internal", path: "/ns/shop/sa/cart"},
		{in: "spiffe://td", td: "td"},
		{in: "spiffe://a_b-c.9/A.b_c-9", td: "a_b-c.9", path: "/A.b_c-9"},
		{in: "spiffe://td/...", td: "td", path: "/..."},
		{in: long, td: "td", path: long[11:]},
		{in: long + "a", err: "too long"},
		{in: "", err: "does not begin"},
		{in: "SPIFFE://td/a", err: "does not begin"},
		{in: "https://td/a", err: "does not begin"},
		{in: "spiffe:///a", err: "trust domain is empty"},
		{in: "spiffe://", err: "trust domain is empty"},
		{in: "spiffe://TD/a", err: `not 'T'`},
		{in: "spiffe://td:80/a", err: `not ':'`},
		{in: "spiffe://u@td/a", err: `not '@'`},
		{in: "spiffe://td/", err: "segment is empty"},
		{in: "spiffe://td/a/", err: "segment is empty"},
		{in: "spiffe://td/a//b", err: "segment is empty"},
		{in: "spiffe://td/a/./b", err: `segment is "."`},
		{in: "spiffe://td/a/../b", err: `segment is ".."`},
		{in: "spiffe://td/%61", err: `not '%'`},
		{in: "spiffe://td/a?q", err: `not '?'`},
		{in: "spiffe://td/a#", err: `not '#'`},
		{in: "spiffe://td?q", err: `not '?'`},
		{in: "spiffe://td/a b", err: `not ' '`},
		{in: "spiffe://" + strings.Repeat("a", 255) + "/x", td: strings.Repeat("a", 255), path: "/x"},
		{in: "spiffe://" + strings.Repeat("a", 256), err: "256 bytes"},
	} {
		id, err := Parse(tt.in)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) || !id.IsZero() {
				t.Errorf("Parse(%.60q) = %v, %v; want an error with %q", tt.in, id, err, tt.err)
			}
			continue
		}
		if err != nil || id.String() != tt.in || id.TrustDomain() != tt.td || id.Path() != tt.path {
			t.Errorf("Parse(%.60q) = %q %q %q, %v", tt.in, id, id.TrustDomain(), id.Path(), err)
		}
	}
}

func TestForServiceAccount(t *testing.T) {
	id, err := ForServiceAccount("td", "shop", "cart")
	if err != nil || id.String() != "spiffe://td/ns/shop/sa/cart" {
		t.Errorf("got %v, %v", id, err)
	}
	for _, bad := range [][3]string{{"td", "a/b", "c"}, {"td", "a", "b/../c"}, {"td", "", "c"}, {"td", "a", ""}, {"t/d", "a", "b"}} {
		if id, err := ForServiceAccount(bad[0], bad[1], bad[2]); err == nil {
			t.Errorf("%q gave %v", bad, id)
		}
	}
}

func TestZero(t *testing.T) {
	var id ID
	if id.String() != "" || id.TrustDomain() != "" || id.Path() != "" || !id.IsZero() {
		t.Error("the zero ID is not empty")
	}
	if err := id.UnmarshalText([]byte("spiffe://td/a")); err != nil || id.String() != "spiffe://td/a" {
		t.Error(id, err)
	}
	if err := id.UnmarshalText([]byte("x")); err == nil || id.IsZero() {
		t.Error("a bad text must leave the ID alone")
	}
}

// FuzzParse compares with the specification's grammar written as an expression.
func FuzzParse(f *testing.F) {
	f.Add("spiffe://td/ns/shop/sa/cart")
	f.Add("spiffe://td/a/../b")
	grammar := regexp.MustCompile(`\Aspiffe://[a-z0-9._-]{1,255}(/[A-Za-z0-9._-]+)*\z`)
	dots := regexp.MustCompile(`/\.{1,2}(/|\z)`)
	f.Fuzz(func(t *testing.T, s string) {
		rest := strings.TrimPrefix(s, "spiffe://")
		want := len(s) <= 2048 && grammar.MatchString(s) && !dots.MatchString("/"+rest[min(len(rest), strings.IndexByte(rest+"/", '/')):])
		id, err := Parse(s)
		if (err == nil) != want {
			t.Fatalf("Parse(%q): %v, the grammar says %v", s, err, want)
		}
		if err == nil && (id.String() != s || "spiffe://"+id.TrustDomain()+id.Path() != s) {
			t.Fatalf("Parse(%q) = %q + %q", s, id.TrustDomain(), id.Path())
		}
	})
}

// cert makes a self-signed certificate whose SAN holds exactly these URIs, byte for byte.
func cert(t *testing.T, mod func(*x509.Certificate), uris ...string) *x509.Certificate {
	t.Helper()
	var names []asn1.RawValue
	for _, u := range uris {
		names = append(names, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 6, Bytes: []byte(u)})
	}
	names = append(names, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 2, Bytes: []byte("cart.shop")}) // a DNS name is allowed
	san, err := asn1.Marshal(names)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
		ExtraExtensions: []pkix.Extension{{Id: oidSAN, Value: san}},
	}
	if mod != nil {
		mod(c)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

func TestFromCert(t *testing.T) {
	const id = "spiffe://td/ns/a/sa/b"
	for _, tt := range []struct {
		name string
		uris []string
		mod  func(*x509.Certificate)
		err  string
	}{
		{name: "good", uris: []string{id}},
		{name: "no key usage", uris: []string{id}, mod: func(c *x509.Certificate) { c.KeyUsage = 0 }},
		{name: "none", err: "0 URI names"},
		{name: "two", uris: []string{id, id}, err: "2 URI names"},
		{name: "two kinds", uris: []string{id, "https://x"}, err: "2 URI names"},
		{name: "other scheme", uris: []string{"https://td/ns/a"}, err: "does not begin"},
		{name: "trust domain only", uris: []string{"spiffe://td"}, err: "not a workload"},
		{name: "empty fragment, which net/url drops", uris: []string{id + "#"}, err: "not '#'"},
		{name: "scheme in capitals, which net/url lowers", uris: []string{"SPIFFE://td/ns/a/sa/b"}, err: "does not begin"},
		{name: "escaped", uris: []string{"spiffe://td/ns/a/sa/%62"}, err: "not '%'"},
		{name: "CA", uris: []string{id}, mod: func(c *x509.Certificate) { c.IsCA = true; c.KeyUsage = x509.KeyUsageCertSign }, err: "a CA's"},
		{name: "may sign", uris: []string{id}, mod: func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign }, err: "may sign"},
		{name: "may not sign handshakes", uris: []string{id}, mod: func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyEncipherment }, err: "digitalSignature"},
	} {
		got, err := FromCert(cert(t, tt.mod, tt.uris...))
		switch {
		case tt.err == "" && (err != nil || got.String() != id):
			t.Errorf("%s: %v, %v", tt.name, got, err)
		case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
			t.Errorf("%s: %v, %v; want an error with %q", tt.name, got, err, tt.err)
		}
	}
	if _, err := FromCert(&x509.Certificate{URIs: []*url.URL{{Scheme: "spiffe", Host: "td", Path: "/a"}}}); err == nil {
		t.Error("a certificate that was not parsed has no bytes to be judged by")
	}
}
