package dataplane

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

// TestCertificates: valid, expired and missing ones; their keys in none of them.
func TestCertificates(t *testing.T) {
	now := time.Now()
	ca, err := devca.Open(t.TempDir(), "td.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	id, err := spiffeid.Parse("spiffe://td.test/ns/shop/sa/web")
	if err != nil {
		t.Fatal(err)
	}
	v, err := ca.Issue(id, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	ref := func(pod string) mtls.Ref {
		return mtls.Ref{Container: "c-" + pod, Namespace: "shop", Account: "web", Pod: pod, ID: id}
	}
	held := []mtls.Held{
		{Ref: ref("web-2")},
		{Ref: ref("web-1"), SVID: v, Since: now.Add(-time.Minute)},
	}
	got := certificates(held, "", 10, now)
	if len(got.Certificates) != 2 || got.Total != 2 || got.Certificates[1].State != "missing" || got.Certificates[1].Wanted != id.String() {
		t.Fatalf("%+v", got)
	}
	c := got.Certificates[0]
	if c.Pod != "shop/web-1" || c.State != "valid" || c.SPIFFEID != id.String() || !c.NotAfter.Equal(v.Cert.Leaf.NotAfter) || c.AgeMS != 60_000 ||
		c.TrustDomain != "td.test" || len(c.Bundle) != 1 || !strings.Contains(c.Issuer, devca.CommonName) || c.Serial == "" {
		t.Errorf("%+v", c)
	}
	if got := certificates(held, "shop/web-1", 10, v.NotAfter).Certificates; len(got) != 1 || got[0].State != "expired" {
		t.Errorf("at its end: %+v", got)
	}
	if got := certificates(held, "", 1, now); len(got.Certificates) != 1 || got.Total != 2 {
		t.Errorf("with a limit of 1: %+v", got)
	}
	b, err := json.Marshal(certificates(held, "", 10, now))
	if err != nil || strings.Contains(strings.ToLower(string(b)), "private") || strings.Contains(string(b), `"D":`) {
		t.Errorf("%v %s", err, b)
	}
}
