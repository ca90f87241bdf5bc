package netns

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// TestCertificateCannotBeRenewed: what the issuer wrote and cannot be read is a problem of the status, is with the
// certificates, and counts in the metrics, until it is mended; the certificate that is in force stays so.
func TestCertificateCannotBeRenewed(t *testing.T) {
	ctx := within(t, time.Minute)
	const account, another = "renewed", "renewedother"
	pod := addPod(t, ctx, mesh.Pod{Name: account})
	addPod(t, ctx, mesh.Pod{Name: another})
	dir := func(account string) string { return filepath.Join(w.Rig.Dir, "certs", "shop", account) }
	read := func(account, name string) string {
		b, err := os.ReadFile(filepath.Join(dir(account), name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	admin := func(ctx context.Context, path string) (string, error) {
		b, err := w.Admin(ctx, 0, path)
		return string(b), err
	}
	// told waits until status, certificates and metrics say so, or say nothing.
	told := func(what string, is bool) {
		t.Helper()
		if err := rig.Until(ctx, func(ctx context.Context) error {
			for _, path := range []string{"/status?format=text", "/certs?format=text"} {
				text, err := admin(ctx, path)
				if err != nil {
					return err
				}
				found := false
				for l := range strings.Lines(text) {
					found = found || strings.Contains(l, "shop/"+pod.Name) && strings.Contains(l, "cannot be renewed")
				}
				if found != is {
					return fmt.Errorf("%s: told is %v:\n%s", path, found, text)
				}
			}
			text, err := admin(ctx, "/metrics")
			if err != nil {
				return err
			}
			if want := map[bool]string{true: "\naether_certificates_failed 1\n", false: "\naether_certificates_failed 0\n"}[is]; !strings.Contains(text, want) {
				return fmt.Errorf("no %q", want)
			}
			for l := range strings.Lines(text) {
				var at float64
				if n, _ := fmt.Sscanf(l, "aether_certificate_first_end_seconds %g", &at); n == 1 && time.Unix(int64(at), 0).After(time.Now()) {
					return nil
				}
			}
			return fmt.Errorf("no end of a certificate, or a past one")
		}); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	told("before", false)
	for _, tt := range []struct {
		name  string
		files map[string]string
	}{
		{"an empty bundle", map[string]string{rig.BundleFile: ""}},
		{"a key that does not parse", map[string]string{rig.KeyFile: "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"}},
		{"half a chain", map[string]string{rig.CertFile: read(account, rig.CertFile)[:200]}},
		{"another's identity", map[string]string{
			rig.CertFile: read(another, rig.CertFile), rig.KeyFile: read(another, rig.KeyFile), rig.BundleFile: read(another, rig.BundleFile),
		}},
	} {
		for name, text := range tt.files {
			if err := os.WriteFile(filepath.Join(dir(account), name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		told(tt.name, true)
		if text, err := admin(ctx, "/certs?format=text&pod=shop/"+pod.Name); err != nil || !strings.Contains(text, "valid") {
			t.Errorf("%s: the certificate that is in force: %v\n%s", tt.name, err, text)
		}
		if err := w.Issue(rig.SVIDRequest{Namespace: "shop", Account: account}); err != nil {
			t.Fatal(err)
		}
		told(tt.name+", mended", false)
	}
}
