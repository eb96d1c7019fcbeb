"""What other packages' extension points ask for, one package each; imported only on request."""
