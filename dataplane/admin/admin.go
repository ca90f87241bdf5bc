// Package admin is the node's window: readiness, the snapshot, explanations, the last
// decisions, what is open now, metrics and profiles, over HTTP on a loopback address.
//
//   - Read only but for the log level: nothing here changes what the node does.
//   - What it prints can be read back: the snapshot is a configuration, a flow
//     in /why is an argument of /explain.
//   - No secret is shown, and no page of another site is answered (package guard).
//   - Of what peers sent nothing is written that a terminal would act upon. The snapshot
//     is a configuration, and written as it is.
//
// It asks the node; it knows no socket of the data plane.
package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"aether/controlplane/input"
	"aether/dataplane"
	"aether/dataplane/admin/guard"
	"aether/dataplane/journal"
	"aether/dataplane/model"
)

// Config of the admin's handler. All fields are required.
type Config struct {
	Node    *dataplane.Node
	Why     *journal.Ring
	Metrics http.Handler
	// Report is what the control loop tells of itself.
	Report func() input.Report
	// Wait returns once every source has said its whole state, if synced, and a state of at
	// least that sequence number is in force; or ctx's error.
	Wait func(ctx context.Context, synced bool, seq uint64) error
	// Dump writes the mesh in force as a configuration.
	Dump func() []byte
	// Level is the log's, which /loglevel shows and sets.
	Level *slog.LevelVar
}

// Handler serves the admin's paths.
func Handler(c Config) http.Handler {
	a := &admin{c}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", guard.Plain(a.index))
	mux.HandleFunc("GET /ready", guard.Plain(a.ready))
	mux.HandleFunc("GET /snapshot", a.snapshot)
	mux.HandleFunc("GET /explain", guard.Plain(a.explain))
	mux.HandleFunc("GET /why", guard.Plain(a.why))
	mux.HandleFunc("GET /status", guard.Plain(a.status))
	mux.HandleFunc("GET /wait", guard.Plain(a.wait))
	mux.HandleFunc("GET /connections", guard.Plain(a.connections))
	mux.HandleFunc("GET /sessions", guard.Plain(a.sessions))
	mux.HandleFunc("GET /endpoints", guard.Plain(a.endpoints))
	mux.HandleFunc("GET /certs", guard.Plain(a.certs))
	mux.HandleFunc("GET /loglevel", guard.Plain(a.level))
	mux.HandleFunc("PUT /loglevel", guard.Plain(a.setLevel))
	mux.Handle("GET /metrics", c.Metrics)
	guard.Profiles(mux)
	return guard.Handler(mux)
}

type admin struct{ Config }

func (a *admin) index(w http.ResponseWriter, _ *http.Request) {
	text(w)
	fmt.Fprint(w, `aether-proxy
/ready                      200 once a state is in force
/status                     sources, pods, certificates, loops, problems; as text with format=text
/wait?for=synced            answers once every source has been heard; for=seq=N: once that state is in force;
     &timeout=30s           within so long (10m at most), or with 504
/snapshot                   the mesh in force, as a configuration (YAML)
/explain?flow=F&request=R   what would become of flow F, and of request R on it, and why
/why?n=N                    the last decisions, newest first; of them, as asked for:
     &bad=1                 refusals and failures only, of which more are kept
     &pod=NS/NAME           of a pod of this node, or of its ServiceAccount
     &reason=R,R            with one of these reasons
     &service=NS/NAME       to a service, or with a Host that names it
/connections                what is open now; as asked for:
     ?pod=NS/NAME           of this pod
     &limit=N               at most so many (200 unless told, 2000 at most)
/sessions                   mTLS sessions to other nodes; pod and limit as above
/endpoints                  what pods have learnt of the endpoints that they call; pod and limit as above
/certs                      certificates and trust bundles of the pods; pod and limit as above
/loglevel                   the log's level; PUT with level=debug|info|warn|error sets it
/metrics                    Prometheus
/debug/pprof/               profiles, one at a time and over a minute at most

/explain, /why, /connections, /sessions, /endpoints and /certs answer in JSON to format=json, and to an Accept field of application/json.
`)
}

// wantsJSON reports whether r asks for JSON instead of text.
func wantsJSON(r *http.Request) bool {
	return r.FormValue("format") == "json" || strings.Contains(r.Header.Get("Accept"), "application/json")
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v)
}

func text(w http.ResponseWriter) { w.Header().Set("Content-Type", "text/plain; charset=utf-8") }

func (a *admin) ready(w http.ResponseWriter, _ *http.Request) {
	text(w)
	if !a.Node.Ready() {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, "not ready: no state is in force yet")
		return
	}
	fmt.Fprintln(w, "ready")
}

func (a *admin) snapshot(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = w.Write(a.Dump())
}

// Status is /status's answer in JSON.
type Status struct {
	input.Report
	Pods  []dataplane.PodStatus `json:"pods"`
	Loops []LoopStatus          `json:"loops"`
}

// LoopStatus tells of one loop.
type LoopStatus struct {
	ID          int           `json:"id"`
	Busy        time.Duration `json:"busy"` // time not spent waiting, in nanoseconds
	Iterations  uint64        `json:"iterations"`
	Events      uint64        `json:"events"`
	Panics      uint64        `json:"panics"`
	Slow        uint64        `json:"slow"`
	Descriptors int64         `json:"descriptors"`
}

func (a *admin) status(w http.ResponseWriter, r *http.Request) {
	s := Status{Report: a.Report()}
	own := a.Node.Problems()
	s.Problems = slices.Concat([]model.Problem{}, s.Problems, own)
	s.ProblemsTotal += len(own)
	s.Pods = a.Node.Pods()
	for _, l := range a.Node.Engine().Loops() {
		st := l.Stats()
		s.Loops = append(s.Loops, LoopStatus{
			ID: l.ID(), Busy: st.Busy, Iterations: st.Iterations, Events: st.Events, Panics: st.Panics, Slow: st.Slow, Descriptors: st.Registered,
		})
	}
	if r.FormValue("format") == "text" {
		text(w)
		WriteStatus(w, &s, time.Now())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(s)
}
