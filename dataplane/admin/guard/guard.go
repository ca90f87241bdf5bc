// Package guard stands in front of an admin: it says who may ask, bounds what an answer
// may cost, and lets nothing out that a terminal would act upon.
//
//   - An admin asks nobody who they are: whoever reaches its address may read. What is
//     kept out are pages of other sites in a browser that reaches it: by the name that they
//     asked for (DNS rebinding), and by where a request comes from (CSRF).
//   - What changes something is a PUT, which no page may send elsewhere without asking
//     (CORS), and which nothing here answers.
//
// It knows none of the admin's paths but those of package pprof.
package guard

import (
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"

	"aether/dataplane/plain"
)

// maxSeconds bounds in seconds what a profile or trace may be taken over.
const maxSeconds = 60

// Handler passes on to h what a tool on this machine asks, and answers 403 to what a
// page of another site may have asked.
func Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if why := refused(r); why != "" {
			http.Error(w, plain.String(why), http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// refused says why r is not answered, and how it would be; "": it is.
func refused(r *http.Request) string {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ours(r.Host, local) {
		return fmt.Sprintf("host %q is not this admin's: ask it by the address that it listens on, a loopback address, or localhost", r.Host)
	}
	if s := r.Header.Get("Sec-Fetch-Site"); s != "" && s != "same-origin" && s != "none" {
		return "a page of another site asks (Sec-Fetch-Site): open the address itself"
	}
	for _, origin := range r.Header.Values("Origin") {
		if u, err := url.Parse(origin); err != nil || u.Host == "" || u.Host != r.Host {
			return fmt.Sprintf("a page of %q asks (Origin): open the address itself", origin)
		}
	}
	return ""
}

// ours reports whether a Host names the machine that it is asked on: a page whose name
// was made to mean this machine has its own name there. None is of HTTP/1.0, and of no browser.
func ours(host string, local net.Addr) bool {
	if host == "" {
		return true
	}
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	} else {
		host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	if strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	a = a.WithZone("").Unmap()
	if a.IsLoopback() {
		return true
	}
	t, ok := local.(*net.TCPAddr)
	return ok && t.AddrPort().Addr().WithZone("").Unmap() == a
}

// Plain passes what h answers through a plain.Writer: for answers that hold anybody's text.
func Plain(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { h(plainly{w}, r) }
}

type plainly struct{ http.ResponseWriter }

func (w plainly) Write(b []byte) (int, error) { return plain.NewWriter(w.ResponseWriter).Write(b) }

// Profiles adds package pprof's paths to mux. What takes a profile is taken one at a
// time (503), over maxSeconds at most (400).
func Profiles(mux *http.ServeMux) {
	var t turn
	mux.HandleFunc("GET /debug/pprof/{$}", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/{profile}", t.one(pprof.Index))
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/profile", t.one(pprof.Profile))
	mux.HandleFunc("GET /debug/pprof/trace", t.one(pprof.Trace))
}

// turn is what one handler at a time has.
type turn struct{ busy atomic.Bool }

// one bounds h in time, by its parameter seconds, and lets it run beside no other.
func (t *turn) one(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if s := r.FormValue("seconds"); s != "" {
			// pprof takes fractions for a trace alone, and no number for its default.
			if n, err := strconv.ParseFloat(s, 64); err != nil || !(n > 0 && n <= maxSeconds) {
				http.Error(w, plain.String(fmt.Sprintf("seconds: %q is no number above 0, and %d at most", s, maxSeconds)), http.StatusBadRequest)
				return
			}
		}
		if !t.busy.CompareAndSwap(false, true) {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "another profile is being taken: ask again when it is done", http.StatusServiceUnavailable)
			return
		}
		defer t.busy.Store(false)
		h(w, r)
	}
}
