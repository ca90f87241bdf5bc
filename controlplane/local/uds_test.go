package local

import (
	"fmt"
	"testing"

	"aether/dataplane/model"
)

// TestUnixSockets: what decides of a pod's Unix socket (contract 1.7) is said of its workload, and over a
// restart; that volumes are not known is another thing than that there are none.
func TestUnixSockets(t *testing.T) {
	for _, volumes := range [][]Volume{nil, {}, {{Name: "app", Driver: "csi.aether.io"}, {Name: "tmp"}}} {
		inWorld(t, nil, func(w *world) {
			p := cart(1, "endpoint.aether.io/uds-socket", "app/http.sock")
			p.UID, p.Volumes = "u-1", volumes
			w.add(p)
			is := func(when string) {
				t.Helper()
				got := w.work["c1"]
				var want []model.Volume
				if volumes != nil {
					want = []model.Volume{}
				}
				for _, v := range volumes {
					want = append(want, model.Volume{Name: v.Name, Driver: v.Driver})
				}
				if got.UID != "u-1" || got.UDSSocket != "app/http.sock" || fmt.Sprintf("%#v", got.Volumes) != fmt.Sprintf("%#v", want) {
					t.Errorf("%s: %q %q %#v, want %#v", when, got.UID, got.UDSSocket, got.Volumes, want)
				}
				if len(w.problems["pod c1"]) > 0 {
					t.Errorf("%s: %v", when, w.problems)
				}
			}
			is("added")
			w.restart()
			is("restarted")
		})
	}
	inWorld(t, nil, func(w *world) {
		p := cart(1)
		p.Volumes = make([]Volume, maxVolumes+1)
		if _, err := w.pods.Add(t.Context(), p); err == nil {
			t.Errorf("%d volumes are taken", len(p.Volumes))
		}
		p.Volumes = p.Volumes[:maxVolumes]
		w.add(p)
	})
}
