package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"aether/dataplane/admin"
	"aether/dataplane/http1"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/sniff"
	"aether/sniff/replay"
)

// judge says what the proxy would have done with the flows of a capture.
type judge struct {
	mesh *mesh
	who  model.ServiceName  // whose traffic it is; empty: the client's address says so
	snap *snapshot.Snapshot // of who's node
}

func (j *judge) explain(f *replay.Flow) *judgement {
	if f.Transport != replay.TCP {
		return &judgement{Error: "not judged: the proxy captures TCP"}
	}
	if f.Server.Port() == model.PortMesh {
		return j.hop(f)
	}
	flow := model.Flow{Namespace: j.who.Namespace, Workload: j.who.Name, Dir: model.Captured, Dst: model.OrigDst{AddrPort: f.Server}}
	snap := j.snap
	if snap == nil {
		s, pod := j.mesh.at(f.Client.Addr())
		if pod == nil {
			return &judgement{Error: fmt.Sprintf("no pod of the mesh has the address %s: say whose traffic it is with --pod", f.Client.Addr())}
		}
		snap = s
		flow.Namespace, flow.Workload, flow.Container = pod.Service.Namespace, pod.Service.Name, pod.ContainerID
	}
	if f.Server.Addr().IsLoopback() && f.Server.Port() == model.PortProxy {
		flow.Dir, flow.Dst = model.Proxy, model.OrigDst{}
	}
	flow.Host = f.Host
	switch f.Proto {
	case sniff.HTTP10:
		flow.Sniff = model.SniffHTTP10
	case sniff.HTTP11:
		flow.Sniff = model.SniffHTTP11
	case sniff.H2C:
		flow.Sniff = model.SniffH2C
	case sniff.TLS:
		flow.Sniff, flow.Host = model.SniffTLS, f.SNI
	case sniff.Unknown:
		flow.Sniff = model.SniffOpaque
		if f.Begins {
			flow.Sniff = model.SniffMalformed
		}
	case sniff.None:
		if f.Incomplete {
			return &judgement{Error: "the client's first bytes are not in the file"}
		}
		flow.Sniff = model.SniffSilent
	}
	switch f.Proto {
	case sniff.HTTP10, sniff.HTTP11, sniff.H2C:
	default:
		return &judgement{Explanation: admin.ExplainFlow(snap, &flow, nil)}
	}
	head, err := firstRequest(f)
	if err != nil { // the verdict for the connection is all there is
		return &judgement{Explanation: admin.ExplainFlow(snap, &flow, nil), Error: err.Error()}
	}
	flow.Host = string(head.Authority)
	return &judgement{Explanation: admin.ExplainFlow(snap, &flow, head)}
}

// hop judges what one proxy sent to another's mTLS port: the server name is the
// port that it asks for (contract 6.2). Who the caller is stands in its certificate, which
// is not to be seen.
func (j *judge) hop(f *replay.Flow) *judgement {
	snap, pod := j.mesh.at(f.Server.Addr())
	if pod == nil {
		return &judgement{Error: fmt.Sprintf("a hop between proxies, and no pod of the mesh has the address %s", f.Server.Addr())}
	}
	port, err := strconv.ParseUint(f.SNI, 10, 16)
	if f.Proto != sniff.TLS || err != nil {
		return &judgement{Error: "a connection to the mTLS port whose server name is no port"}
	}
	flow := model.Flow{
		Namespace: pod.Service.Namespace, Workload: pod.Service.Name, Container: pod.ContainerID,
		Dir: model.Inbound, Dst: model.OrigDst{AddrPort: netip.AddrPortFrom(netip.Addr{}, uint16(port))},
	}
	return &judgement{Explanation: admin.ExplainFlow(snap, &flow, nil)}
}

// requestFor is the request that is meant where only a host is said.
func requestFor(host string) httpmsg.Head {
	return httpmsg.Head{Method: []byte("GET"), Scheme: []byte("http"), Authority: []byte(host), Path: []byte("/"), Minor: 1}
}

var errHeadCut = errors.New("the head of the first request is not whole in the file")

// firstRequest reads the first request of an HTTP flow with the proxy's own codecs.
func firstRequest(f *replay.Flow) (*httpmsg.Head, error) {
	if f.Proto == sniff.H2C {
		r := &firstHead{}
		_, err := http2.New(http2.Config{Server: true}, r).Feed(f.Head)
		switch {
		case r.head != nil:
			return r.head, nil
		case r.refused != nil:
			return nil, r.refused
		case err != nil:
			return nil, fmt.Errorf("the proxy would end the connection: %w", err)
		}
		return nil, errHeadCut
	}
	var p http1.Parser
	var h httpmsg.Head
	n, _, err := p.Request(f.Head, &h)
	switch {
	case err != nil:
		status := 400
		if e, ok := errors.AsType[*http1.Error](err); ok {
			status = e.Status
		}
		return nil, fmt.Errorf("where it serves the request it answers %d: %w", status, err)
	case n == 0:
		return nil, errHeadCut
	}
	return &h, nil
}

// firstHead keeps the first request of an HTTP/2 connection.
type firstHead struct {
	head    *httpmsg.Head
	refused error // it was refused
}

func (r *firstHead) OnHead(_ *http2.Stream, h *httpmsg.Head, _ bool) {
	if r.head == nil && r.refused == nil {
		r.head = &httpmsg.Head{}
		h.CloneInto(r.head, nil)
	}
}

func (r *firstHead) OnRefused(status int, why *http2.StreamError) {
	switch {
	case r.head != nil || r.refused != nil:
	case status == 400:
		r.refused = fmt.Errorf("where it serves the request it resets the stream: %w", why)
	default:
		r.refused = fmt.Errorf("where it serves the request it answers %d: %w", status, why)
	}
}
func (*firstHead) OnData(*http2.Stream, []byte, bool)        {}
func (*firstHead) OnTrailers(*http2.Stream, []httpmsg.Field) {}
func (*firstHead) OnReset(*http2.Stream, http2.Code)         {}
func (*firstHead) OnWritable(*http2.Stream)                  {}
func (*firstHead) OnGoAway(uint32, http2.Code)               {}
