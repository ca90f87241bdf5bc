package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"aether/controlplane/registrar/server"
	"aether/dataplane/admin/guard"
)

// admin is the registrar's window. It changes nothing, shows no secret, and answers no page of another site (package guard).
type admin struct {
	server    *server.Server
	metrics   http.Handler
	certified func() bool // there is a certificate to serve with, or none is needed
}

// headTime is how long a request of the admin may take to say what it wants.
const headTime = 10 * time.Second

// run serves on ln until ctx ends, and closes it.
func (a *admin) run(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{Handler: a.handler(), ReadHeaderTimeout: headTime}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func (a *admin) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `aether-registrar
/healthz        200 while the process runs
/readyz         200 once the store's rows are here and there is a certificate, until it leaves
/status         how it fares, in JSON
/metrics        Prometheus
/debug/pprof/   profiles, one at a time and over a minute at most
`)
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", guard.Plain(func(w http.ResponseWriter, _ *http.Request) {
		if why := a.notReady(); why != "" {
			http.Error(w, "not ready: "+why, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ready")
	}))
	mux.HandleFunc("GET /status", guard.Plain(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		_ = enc.Encode(a.server.Status())
	}))
	mux.Handle("GET /metrics", a.metrics)
	guard.Profiles(mux)
	return guard.Handler(mux)
}

// notReady says why no node should come here; empty: it may. A store that is away
// after it was here once is no reason: what is known is served.
func (a *admin) notReady() string {
	st := a.server.Status()
	switch {
	case st.Leaving:
		return "this registrar is leaving"
	case !st.Synced && st.StoreErr != "":
		return "the store cannot be followed: " + st.StoreErr
	case !st.Synced:
		return "the store's rows are not here yet"
	case !a.certified():
		return "there is no certificate of its own yet"
	}
	return ""
}
