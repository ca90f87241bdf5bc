package endpointmeta_test

import (
	"fmt"
	"strings"
	"testing"

	"aether/controlplane/endpointmeta"
	"aether/dataplane/model"
)

// TestResolveUDS: contract 1.7, a reason a line. A path is Dir/Pod/File.
func TestResolveUDS(t *testing.T) {
	const dir, uid = "/run/aether/uds", "6a1f0c9e-0d5b-4a39-9a55-1c2f6e3b7d10"
	csi := func(names ...string) []model.Volume {
		out := []model.Volume{{Name: "tmp"}, {Name: "secrets", Driver: "secrets-store.csi.k8s.io"}}
		for _, n := range names {
			out = append(out, model.Volume{Name: n, Driver: "csi.aether.io"})
		}
		return out
	}
	long := func(n int) string { return strings.Repeat("f", n) }
	for _, tt := range []struct {
		name, dir, uid string
		volumes        []model.Volume
		request, want  string
	}{
		{"the carrier", dir, uid, csi("app"), "app/http.sock", dir + "/" + uid + "/http.sock unix:http.sock"},
		{"its name is in no path", dir, uid, csi("another-name"), "another-name/http.sock", dir + "/" + uid + "/http.sock unix:http.sock"},
		{"another directory", "/x", uid, csi("app"), "app/a", "/x/" + uid + "/a unix:a"},
		{"odd and plain", dir, uid, csi("app"), "app/..a b", dir + "/" + uid + "/..a b unix:..a b"},
		{"volumes are not known", dir, uid, nil, "app/a", dir + "/" + uid + "/a unix:a"},

		{"it is off", "", uid, csi("app"), "app/a", "disabled"},
		{"off comes first", "", "", nil, "app", "disabled"},

		{"no slash", dir, uid, csi("app"), "app", "bad_request"},
		{"nothing", dir, uid, csi("app"), "", "bad_request"},
		{"two slashes", dir, uid, csi("app"), "app/x/y", "bad_request"},
		{"a slash behind", dir, uid, csi("app"), "app/x/", "bad_request"},
		{"a slash in front", dir, uid, csi("app"), "/app/x", "bad_request"},
		{"no volume", dir, uid, csi("app"), "/x", "bad_request"},
		{"the volume leads up", dir, uid, csi("app"), "../x", "bad_request"},
		{"the volume is here", dir, uid, csi("app"), "./x", "bad_request"},
		{"NUL in the volume", dir, uid, csi("app"), "a\x00/x", "bad_request"},

		{"no file", dir, uid, csi("app"), "app/", "bad_file"},
		{"the file leads up", dir, uid, csi("app"), "app/..", "bad_file"},
		{"the file is here", dir, uid, csi("app"), "app/.", "bad_file"},
		{"NUL in the file", dir, uid, csi("app"), "app/a\x00b", "bad_file"},

		{"no UID", dir, "", csi("app"), "app/a", "no_uid"},
		{"a UID that leads up", dir, "..", csi("app"), "app/a", "no_uid"},
		{"a UID with a slash", dir, "a/b", csi("app"), "app/a", "no_uid"},

		{"no such volume", dir, uid, csi("app"), "other/a", "volume_not_declared"},
		{"no volume at all", dir, uid, []model.Volume{}, "app/a", "volume_not_declared"},
		{"an emptyDir", dir, uid, csi("app"), "tmp/a", "not_csi"},
		{"another driver", dir, uid, csi("app"), "secrets/a", "not_csi"},
		{"two carriers", dir, uid, csi("app", "more"), "app/a", "multiple_csi_volumes"},

		{"54 bytes", dir, uid, csi("app"), "app/" + long(54), dir + "/" + uid + "/" + long(54) + " unix:" + long(54)},
		{"55 bytes", dir, uid, csi("app"), "app/" + long(55), "path_too_long"},
		{"bytes, not letters", dir, uid, csi("app"), "app/" + strings.Repeat("é", 28), "path_too_long"},
		{"a long directory", "/" + long(60), uid, csi("app"), "app/" + long(9), "path_too_long"},
		{"and what fits there", "/" + long(60), uid, csi("app"), "app/" + long(8), "/" + long(60) + "/" + uid + "/" + long(8) + " unix:" + long(8)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, err := endpointmeta.ResolveUDS(tt.dir, tt.uid, tt.volumes, tt.request)
			got := ""
			if err != nil {
				got = err.Reason.String()
				if err.Text == "" || s != nil {
					t.Errorf("text %q, socket %v", err.Text, s)
				}
			} else {
				got = fmt.Sprintf("%s/%s/%s %s", s.Dir, s.Pod, s.File, s.Name)
			}
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

// TestUDSReasons: the set is that of contract 1.7.
func TestUDSReasons(t *testing.T) {
	want := map[string]bool{"not_csi": true, "volume_not_declared": true, "bad_file": true, "path_too_long": true,
		"multiple_csi_volumes": true, "no_uid": true, "bad_request": true, "disabled": true}
	for r := endpointmeta.UDSFine + 1; r < endpointmeta.UDSReasons; r++ {
		if !want[r.String()] {
			t.Errorf("%q is no reason, or one twice", r)
		}
		delete(want, r.String())
	}
	if len(want) > 0 || endpointmeta.UDSFine.String() != "" {
		t.Errorf("missing: %v", want)
	}
}
