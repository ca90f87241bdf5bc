package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/tproxy/netns"
)

const maxProbeHead = 16 << 10 // bytes of the head that an application answers a probe with

// Target is what a probe asks (contract 6.6).
type Target struct {
	Container string
	Port      uint16
	Class     model.Class
	Path      string // of an HTTP port
}

// Dial connects to a port of a container's application, the way that requests are delivered to it:
// to 127.0.0.1 in the pod's network namespace, or to its Unix socket (contract 6.5).
type Dial func(ctx context.Context, container string, port uint16) (net.Conn, error)

// Prober asks applications over connections that dial makes: an HTTP port by GET, to
// which the answer must be 200; a TCP port by connecting. A UDP port has nothing that
// could be asked, and is taken to answer. The context bounds it.
func Prober(dial Dial) func(ctx context.Context, t Target) error {
	type key struct{}
	transport := &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxProbeHead,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			t := ctx.Value(key{}).(Target)
			return dial(ctx, t.Container, t.Port)
		},
	}
	return func(ctx context.Context, t Target) error {
		switch t.Class {
		case model.UDP:
			return nil
		case model.TCP:
			c, err := dial(ctx, t.Container, t.Port)
			if err != nil {
				return err
			}
			return c.Close()
		}
		r := &http.Request{
			Method: http.MethodGet, Host: "localhost", Header: http.Header{"User-Agent": {"aether-probe"}},
			URL: &url.URL{Scheme: "http", Host: "localhost", Opaque: opaque(t.Path)}, ProtoMajor: 1, ProtoMinor: 1,
		}
		res, err := transport.RoundTrip(r.WithContext(context.WithValue(ctx, key{}, t)))
		if err != nil {
			return err
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s answers %d, wanted 200", t.Path, res.StatusCode)
		}
		return nil
	}
}

// opaque has the path sent as it is written. One that begins with two slashes would be
// taken for an authority.
func opaque(path string) string {
	if strings.HasPrefix(path, "//") {
		return "//localhost" + path
	}
	return path
}

// target is what p's probe asks.
func (p *pod) target() Target {
	t := Target{Container: p.rec.ContainerID, Port: p.meta.DefaultPort, Path: p.meta.HealthPath}
	for _, port := range p.meta.Ports { // the declared port is always among them
		if port.Number == t.Port {
			t.Class = port.Class
		}
	}
	return t
}

// watch probes p until ctx ends, at moments of the interval that are its own.
func (l *Pods) watch(ctx context.Context, p *pod) {
	first := time.NewTimer(spread(p.rec.ContainerID, probeInterval))
	defer first.Stop()
	select {
	case <-first.C:
	case <-ctx.Done():
		return
	}
	every := time.NewTicker(probeInterval)
	defer every.Stop()
	for {
		l.probe(ctx, p)
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
	}
}

func (l *Pods) probe(ctx context.Context, p *pod) {
	select {
	case l.probes <- struct{}{}:
	case <-ctx.Done():
		return
	}
	in, cancel := context.WithTimeout(ctx, probeTimeout)
	err := l.cfg.Probe(in, p.target())
	cancel()
	<-l.probes
	if ctx.Err() != nil {
		return
	}
	l.observe(p, err)
}

// observe takes what a probe found (contract 13.2).
func (l *Pods) observe(p *pod, err error) {
	certificate := l.cfg.Certificate(p.rec.ContainerID)
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pods[p.rec.ContainerID] != p {
		return
	}
	if errors.Is(err, netns.ErrGone) { // no second look is needed (case 138)
		p.app.fails, p.row.fails = unhealthAfter-1, unhealthAfter-1
	}
	if before := p.app.ok; before != p.app.observe(err == nil) {
		l.log.Info("application", "pod", p.name(), "answers", p.app.ok, "err", err)
		p.view.answers.Store(p.app.ok)
	}
	healthy := p.row.observe(err == nil && certificate)
	to := p.health()
	switch {
	case healthy:
		to = registrypb.ServiceEndpoint_HEALTHY
	case p.meta.HealthCheck == endpointmeta.HealthEDS || now.Sub(p.seen) >= firstSight:
		to = registrypb.ServiceEndpoint_UNHEALTHY
	}
	if to == p.health() || p.rec.Phase != alive {
		return
	}
	if err == nil && !certificate {
		err = errors.New("its inbound listener has no certificate")
	}
	l.log.Info("endpoint", "pod", p.name(), "service", p.service, "health", to, "err", err)
	p.rec.Health = to.String()
	l.Counts.HealthTransitions.Inc()
	if to == registrypb.ServiceEndpoint_HEALTHY && !p.waits.IsZero() {
		l.Counts.promoted(now.Sub(p.waits))
		p.waits = time.Time{}
	}
	l.persistLocked(p)
	l.settleLocked(p.key(), false)
}

// Handler answers GET /healthz/health_<pod> (contract 6.6): 200 where the application
// answers, 503 where it does not or has not yet, 404 where there is no such pod. Of
// pods of several namespaces that share a name all must answer.
func (l *Pods) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz/{name}", func(w http.ResponseWriter, r *http.Request) {
		name, ok := strings.CutPrefix(r.PathValue("name"), "health_")
		known, answers := false, true
		l.views.Range(func(_, v any) bool {
			if v := v.(*view); ok && v.name == name {
				known = true
				answers = answers && v.answers.Load()
			}
			return true
		})
		switch {
		case !known:
			http.Error(w, "no such pod on this node", http.StatusNotFound)
		case !answers:
			http.Error(w, "the application does not answer its probe, or has not yet", http.StatusServiceUnavailable)
		default:
			fmt.Fprintln(w, "healthy")
		}
	})
	return mux
}
