package server

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/mtls"
	"aether/mtls/spiffeid"
)

// peer is the verified identity of who calls; zero without TLS.
func (s *Server) peer(ctx context.Context) (spiffeid.ID, error) {
	if s.cfg.TLS == nil {
		return spiffeid.ID{}, nil
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return spiffeid.ID{}, status.Error(codes.Unauthenticated, "there is no connection to know the caller by")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return spiffeid.ID{}, status.Error(codes.Unauthenticated, "the connection is not TLS")
	}
	id, err := mtls.PeerID(&info.State)
	if err != nil {
		return spiffeid.ID{}, status.Error(codes.Unauthenticated, err.Error())
	}
	return id, nil
}

// writer is who changes rows.
type writer struct {
	id   spiffeid.ID // zero without TLS
	node string      // which id names; empty: it names none
}

// mayWrite says who may change rows: Config.Writer. Which, judge and the statement of a
// removal say.
func (s *Server) mayWrite(ctx context.Context) (writer, error) {
	id, err := s.peer(ctx)
	if err != nil {
		return writer{}, err
	}
	if s.cfg.TLS != nil && s.cfg.Writer != nil && !s.cfg.Writer(id) {
		s.denied.Inc()
		s.quiet.Warn("denied "+id.String(), "a caller may not change rows: see --writer", "peer", id.String())
		return writer{}, status.Errorf(codes.PermissionDenied, "%s may not change rows: the registrar's --writer says who may", id)
	}
	w := writer{id: id}
	if s.cfg.Node != nil && !id.IsZero() {
		w.node = s.cfg.Node(id)
	}
	return w, nil
}

// otherNode: the row is not of the node that its writer is.
const otherNode registry.Fault = "other_node"

// judge says why a valid row is not believed of who writes it.
func (s *Server) judge(who writer, service model.ServiceName, e *registrypb.ServiceEndpoint) (registry.Fault, string) {
	if node := e.GetKubernetesMetadata().GetNodeName(); who.node != "" && node != who.node {
		return otherNode, fmt.Sprintf("it is of node %.253q, and %s writes rows of node %s", node, who.id, who.node)
	}
	domain := s.cfg.TrustDomain
	if domain == "" && !who.id.IsZero() {
		domain = who.id.TrustDomain()
	}
	if domain == "" {
		return registry.NoFault, ""
	}
	return registry.IdentityFault(service, domain, e, s.cfg.Identities...)
}

// encode is a row of the store, where nodes can be told of it: whoever wrote it there may
// have been judged by nobody.
func (s *Server) encode(r registry.Row) (*row, error) {
	if s.cfg.TrustDomain != "" {
		if _, why := registry.IdentityFault(r.Service, s.cfg.TrustDomain, r.Endpoint, s.cfg.Identities...); why != "" {
			return nil, errors.New(why)
		}
	}
	return encode(r)
}
