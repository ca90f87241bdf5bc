package server

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

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

// mayWrite says who may change rows: Config.Writer. It does not say which: an agent's
// identity names no node, so one agent can write the rows of another node's pods.
func (s *Server) mayWrite(ctx context.Context) error {
	id, err := s.peer(ctx)
	if err != nil {
		return err
	}
	if s.cfg.TLS == nil || s.cfg.Writer == nil || s.cfg.Writer(id) {
		return nil
	}
	s.denied.Inc()
	s.quiet.Warn("denied "+id.String(), "a caller may not change rows: see --writer", "peer", id.String())
	return status.Errorf(codes.PermissionDenied, "%s may not change rows: the registrar's --writer says who may", id)
}
