package dataplane

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/dataplane/outbound"
	"aether/mtls"
)

// askTime bounds how long a question waits for loops that do not answer.
const askTime = time.Second

// Connections are what a node carries now.
type Connections struct {
	Connections []engine.ConnState `json:"connections"`
	// Total is how many there are, which may be more than are listed.
	Total int `json:"total"`
	// Silent are the loops that did not answer within askTime: what they carry is missing.
	Silent []int `json:"silent_loops,omitempty"`
}

// Connections tells of up to limit connections, of pod ("shop/web-1"; "": of all).
func (n *Node) Connections(ctx context.Context, pod string, limit int) Connections {
	type part struct {
		list  []engine.ConnState
		total int
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	var out Connections
	parts, silent := engine.Ask(ctx, n.engine, func(l *engine.Loop) part {
		list, total := l.Conns(pod, limit)
		return part{list, total}
	})
	out.Silent = silent
	for _, r := range []*engine.Relays{&n.out.Relays, &n.in.Relays} {
		list, total := r.List(pod, limit)
		parts = append(parts, part{list, total})
	}
	out.Connections = []engine.ConnState{}
	for _, p := range parts {
		out.Connections = append(out.Connections, p.list...)
		out.Total += p.total
	}
	slices.SortFunc(out.Connections, func(a, b engine.ConnState) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Role, b.Role), cmp.Compare(b.AgeMS, a.AgeMS), a.Client.Compare(b.Client))
	})
	out.Connections = out.Connections[:min(limit, len(out.Connections))]
	slices.Sort(out.Silent)
	return out
}

// Sessions are the hop sessions that a node's pods hold now, as the callers.
type Sessions struct {
	Sessions []engine.SessionState `json:"sessions"`
	// Total is how many there are, which may be more than are listed.
	Total int `json:"total"`
	// Silent are the loops that did not answer within askTime: what they carry is missing.
	Silent []int `json:"silent_loops,omitempty"`
}

// Sessions tells of up to limit hop sessions, of pod ("shop/web-1"; "": of all).
func (n *Node) Sessions(ctx context.Context, pod string, limit int) Sessions {
	type part struct {
		list  []engine.SessionState
		total int
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	wall := time.Now()
	parts, silent := engine.Ask(ctx, n.engine, func(l *engine.Loop) part {
		list, total := n.out.Sessions(l, pod, limit, wall)
		return part{list, total}
	})
	out := Sessions{Sessions: []engine.SessionState{}, Silent: silent}
	for _, p := range parts {
		out.Sessions = append(out.Sessions, p.list...)
		out.Total += p.total
	}
	slices.SortFunc(out.Sessions, func(a, b engine.SessionState) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), a.Endpoint.Compare(b.Endpoint), cmp.Compare(a.Port, b.Port), cmp.Compare(b.AgeMS, a.AgeMS))
	})
	out.Sessions = out.Sessions[:min(limit, len(out.Sessions))]
	slices.Sort(out.Silent)
	return out
}

// Endpoints are what a node's pods have learnt of the endpoints that they call.
type Endpoints struct {
	Endpoints []outbound.EndpointState `json:"endpoints"`
	// Total is how many there are, which may be more than are listed.
	Total int `json:"total"`
	// Silent are the loops that did not answer within askTime: what they know is missing.
	Silent []int `json:"silent_loops,omitempty"`
}

// Endpoints tells of up to limit endpoints, as pod ("shop/web-1"; "": each) knows them.
func (n *Node) Endpoints(ctx context.Context, pod string, limit int) Endpoints {
	type part struct {
		list  []outbound.EndpointState
		total int
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	parts, silent := engine.Ask(ctx, n.engine, func(l *engine.Loop) part {
		list, total := n.out.Endpoints(l, pod, limit)
		return part{list, total}
	})
	out := Endpoints{Endpoints: []outbound.EndpointState{}, Silent: silent}
	for _, p := range parts {
		out.Endpoints = append(out.Endpoints, p.list...)
		out.Total += p.total
	}
	slices.SortFunc(out.Endpoints, func(a, b outbound.EndpointState) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Destination, b.Destination), a.Endpoint.Compare(b.Endpoint), cmp.Compare(a.Loop, b.Loop))
	})
	out.Endpoints = out.Endpoints[:min(limit, len(out.Endpoints))]
	slices.Sort(out.Silent)
	return out
}

// Used are the services that the node's pods sent something to lately, in no order, each
// once: what keeps a service in scope that was asked for (contract 4.6).
func (n *Node) Used(ctx context.Context) []model.ServiceName {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	parts, _ := engine.Ask(ctx, n.engine, n.out.Used)
	all := map[model.ServiceName]struct{}{}
	for _, list := range parts {
		for _, s := range list {
			all[s] = struct{}{}
		}
	}
	return slices.Collect(maps.Keys(all))
}

// CertState is a pod's certificate and trust bundle: what everybody it meets is shown,
// and no key. The names in JSON are a promise to scripts; new ones may be added.
type CertState struct {
	Pod       string `json:"pod"` // "shop/web-1"
	Container string `json:"container"`
	Wanted    string `json:"wanted"` // the SPIFFE ID that it must have
	// State: valid, expired, or missing: none has come yet.
	State       string    `json:"state"`
	SPIFFEID    string    `json:"spiffe_id,omitempty"`
	Serial      string    `json:"serial,omitempty"` // hexadecimal
	Issuer      string    `json:"issuer,omitempty"`
	NotBefore   time.Time `json:"not_before,omitzero"`
	NotAfter    time.Time `json:"not_after,omitzero"` // of the chain and its authority: the earliest end
	AgeMS       int64     `json:"age_ms"`             // since it came here
	TrustDomain string    `json:"trust_domain,omitempty"`
	Bundle      []CAState `json:"bundle,omitempty"` // empty: the source does not say
	// Failure is why it could not be renewed, or none has come, as its source said last.
	Failure      string    `json:"failure,omitempty"`
	FailureSince time.Time `json:"failure_since,omitzero"`
}

// CAState is a certificate of a trust bundle.
type CAState struct {
	Subject  string    `json:"subject,omitempty"`
	Serial   string    `json:"serial"`
	NotAfter time.Time `json:"not_after"`
}

// Certificates are the certificates of the pods of a node.
type Certificates struct {
	Certificates []CertState `json:"certificates"`
	Total        int         `json:"total"`
}

// Certificates tells of up to limit pods' certificates, of pod ("shop/web-1"; "": of all).
func (n *Node) Certificates(pod string, limit int) Certificates {
	return certificates(n.certs.Held(), pod, limit, time.Now())
}

func certificates(held []mtls.Held, pod string, limit int, now time.Time) Certificates {
	out := Certificates{Certificates: []CertState{}}
	for _, h := range held {
		name := h.Ref.Namespace + "/" + h.Ref.Pod
		if pod != "" && name != pod {
			continue
		}
		out.Total++
		s := CertState{Pod: name, Container: h.Ref.Container, Wanted: h.Ref.ID.String(), State: "missing"}
		if v := h.SVID; v != nil {
			leaf := v.Cert.Leaf
			s.State = "valid"
			if !now.Before(v.NotAfter) {
				s.State = "expired"
			}
			s.SPIFFEID, s.Serial, s.Issuer = v.ID.String(), serial(leaf), leaf.Issuer.String()
			s.NotBefore, s.NotAfter = leaf.NotBefore.UTC(), v.NotAfter.UTC()
			s.AgeMS, s.TrustDomain = now.Sub(h.Since).Milliseconds(), v.TrustDomain
			for _, ca := range v.Authorities {
				s.Bundle = append(s.Bundle, CAState{ca.Subject.String(), serial(ca), ca.NotAfter.UTC()})
			}
		}
		if f := h.Failure; f != nil {
			s.Failure, s.FailureSince = f.Err.Error(), f.Since.UTC()
		}
		out.Certificates = append(out.Certificates, s)
	}
	slices.SortFunc(out.Certificates, func(a, b CertState) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
	})
	out.Certificates = out.Certificates[:min(limit, len(out.Certificates))]
	return out
}

// certificateProblems are those of identities that could not be renewed. The last one stays in force to its end.
func certificateProblems(held []mtls.Held) (out []model.Problem) {
	for _, h := range held {
		f := h.Failure
		if f == nil {
			continue
		}
		p := model.Problem{Object: "Pod " + h.Ref.Namespace + "/" + h.Ref.Pod, Since: f.Since.UTC().Truncate(time.Second)}
		p.Reason = fmt.Sprintf("has no certificate, and no hop is made from or to it: %v: mend what the issuer wrote", f.Err)
		if h.SVID != nil {
			p.Reason = fmt.Sprintf("its certificate cannot be renewed, and the one that it has ends at %s: %v: mend what the issuer wrote",
				h.SVID.NotAfter.UTC().Format(time.RFC3339), f.Err)
		}
		out = append(out, p)
	}
	return out
}

func serial(c *x509.Certificate) string { return hex.EncodeToString(c.SerialNumber.Bytes()) }
