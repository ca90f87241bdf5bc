// Package spiffeid holds SPIFFE IDs: the names that certificates carry and
// that every hop of the mesh is pinned to.
//
//   - An ID is parsed once, strictly, and compared as a value; two IDs are the
//     same workload exactly when they are equal with ==.
//   - What a certificate says is read from its bytes, not from a net/url that
//     has lower-cased, decoded or dropped parts of it.
//
// It knows no chain, no trust bundle and no connection: an ID taken from a
// certificate means nothing until the chain has been verified.
package spiffeid

import (
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"strings"
)

const (
	scheme = "spiffe://"

	// maxID and maxTrustDomain bound an ID in bytes (SPIFFE-ID 2.3 and 2.1).
	maxID          = 2048
	maxTrustDomain = 255
)

// ID is a SPIFFE ID, spiffe://<trust domain>[/<path>]. The zero value is no
// ID and equals no parsed one. Comparable; safe for concurrent use.
type ID struct {
	s  string
	td int // end of the trust domain in s
}

// Parse reads an ID as SPIFFE-ID 2 spells it: scheme in lower case, a trust
// domain of a-z 0-9 . - _, then nothing or segments of A-Z a-z 0-9 . - _ none
// of which is empty, "." or "..". Anything else, a percent-encoding, query,
// port or trailing slash included, is an error that says what and where.
func Parse(s string) (ID, error) {
	if len(s) > maxID {
		return ID{}, fmt.Errorf("spiffeid: %d bytes are too long, the limit is %d", len(s), maxID)
	}
	rest, ok := strings.CutPrefix(s, scheme)
	if !ok {
		return ID{}, fmt.Errorf("spiffeid: %q does not begin with %s", s, scheme)
	}
	td, path, hasPath := strings.Cut(rest, "/")
	if err := checkTrustDomain(td); err != nil {
		return ID{}, fmt.Errorf("spiffeid: %q: %w", s, err)
	}
	if hasPath {
		for seg := range strings.SplitSeq(path, "/") {
			if err := checkSegment(seg); err != nil {
				return ID{}, fmt.Errorf("spiffeid: %q: %w", s, err)
			}
		}
	}
	return ID{s: s, td: len(scheme) + len(td)}, nil
}

// ForServiceAccount returns the identity of a pod's ServiceAccount:
// spiffe://<td>/ns/<ns>/sa/<sa> (contract 5.3).
func ForServiceAccount(td, ns, sa string) (ID, error) {
	// The parts are checked one by one, so that a slash in one of them cannot
	// name somebody else.
	if err := checkTrustDomain(td); err != nil {
		return ID{}, fmt.Errorf("spiffeid: trust domain %q: %w", td, err)
	}
	for _, p := range [...]string{ns, sa} {
		if err := checkSegment(p); err != nil {
			return ID{}, fmt.Errorf("spiffeid: service account %q of namespace %q: %w", sa, ns, err)
		}
	}
	return Parse(scheme + td + "/ns/" + ns + "/sa/" + sa)
}

// String returns the ID as it was parsed; empty for the zero value.
func (id ID) String() string { return id.s }

// IsZero reports whether id is no ID.
func (id ID) IsZero() bool { return id.s == "" }

// TrustDomain returns the trust domain's name, without scheme.
func (id ID) TrustDomain() string {
	if id.s == "" {
		return ""
	}
	return id.s[len(scheme):id.td]
}

// Path returns what follows the trust domain: empty, or beginning with "/".
func (id ID) Path() string { return id.s[id.td:] }

// MarshalText returns the ID's text form.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.s), nil }

// UnmarshalText parses b; empty text gives the zero value.
func (id *ID) UnmarshalText(b []byte) error {
	if len(b) == 0 {
		*id = ID{}
		return nil
	}
	v, err := Parse(string(b))
	if err != nil {
		return err
	}
	*id = v
	return nil
}

// CheckTrustDomain reports why td is no trust domain's name (SPIFFE-ID 2.1); nil: it is one.
func CheckTrustDomain(td string) error {
	if err := checkTrustDomain(td); err != nil {
		return fmt.Errorf("spiffeid: trust domain %q: %w", td, err)
	}
	return nil
}

// FromCert returns the identity that a parsed leaf certificate carries. It is
// an error unless the certificate is a workload's X.509-SVID: exactly one URI
// SAN, which is a SPIFFE ID with a path, and no CA (X509-SVID 2, 4 and 5.2).
// The chain is the caller's to verify.
func FromCert(c *x509.Certificate) (ID, error) {
	if c.IsCA {
		return ID{}, errors.New("spiffeid: the certificate is a CA's, not a workload's")
	}
	if c.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
		return ID{}, errors.New("spiffeid: the certificate may sign certificates or CRLs, which a workload's may not")
	}
	if c.KeyUsage != 0 && c.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
		return ID{}, errors.New("spiffeid: the certificate's key usage lacks digitalSignature")
	}
	uri, err := soleURI(c)
	if err != nil {
		return ID{}, err
	}
	id, err := Parse(uri)
	if err != nil {
		return ID{}, err
	}
	if id.Path() == "" {
		return ID{}, fmt.Errorf("spiffeid: %q names a trust domain, not a workload", uri)
	}
	return id, nil
}

var oidSAN = asn1.ObjectIdentifier{2, 5, 29, 17}

// tagURI is uniformResourceIdentifier of GeneralName (RFC 5280 4.2.1.6).
const tagURI = 6

// soleURI returns the one URI SAN of c, byte for byte.
func soleURI(c *x509.Certificate) (string, error) {
	uri, n := "", 0
	for _, ext := range c.Extensions {
		if !ext.Id.Equal(oidSAN) {
			continue
		}
		var seq asn1.RawValue
		if rest, err := asn1.Unmarshal(ext.Value, &seq); err != nil || len(rest) != 0 || !seq.IsCompound {
			return "", errors.New("spiffeid: the certificate's subject alternative names are malformed")
		}
		for b := seq.Bytes; len(b) > 0; {
			var v asn1.RawValue
			rest, err := asn1.Unmarshal(b, &v)
			if err != nil {
				return "", errors.New("spiffeid: the certificate's subject alternative names are malformed")
			}
			b = rest
			if v.Class == asn1.ClassContextSpecific && v.Tag == tagURI {
				uri, n = string(v.Bytes), n+1
			}
		}
	}
	if n != 1 {
		return "", fmt.Errorf("spiffeid: the certificate has %d URI names, a workload's has exactly one", n)
	}
	return uri, nil
}

func checkTrustDomain(td string) error {
	if td == "" {
		return errors.New("the trust domain is empty")
	}
	if len(td) > maxTrustDomain {
		return fmt.Errorf("the trust domain has %d bytes, the limit is %d", len(td), maxTrustDomain)
	}
	for i := range len(td) {
		if c := td[i]; !(c >= 'a' && c <= 'z' || plain(c)) {
			return fmt.Errorf("the trust domain may hold a-z 0-9 . - _ but not %q", c)
		}
	}
	return nil
}

func checkSegment(seg string) error {
	switch seg {
	case "":
		return errors.New("a path segment is empty")
	case ".", "..":
		return fmt.Errorf("a path segment is %q", seg)
	}
	for i := range len(seg) {
		if c := seg[i]; !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || plain(c)) {
			return fmt.Errorf("a path segment may hold A-Z a-z 0-9 . - _ but not %q", c)
		}
	}
	return nil
}

// plain: allowed in a trust domain and in a segment alike, letters aside.
func plain(c byte) bool {
	return c >= '0' && c <= '9' || c == '.' || c == '-' || c == '_'
}
